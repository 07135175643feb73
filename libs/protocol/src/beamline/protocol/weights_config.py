"""How new weights reach the engines."""

from beamline.protocol.section import Positive, PositiveFloat, Section, check_choice

TRANSPORTS = ("auto", "shm", "cuda_ipc", "nixl", "checkpoint")
PAUSES = ("keep", "drain", "abort", "overlap")
ABORTED = ("continue", "drop")


class WeightsSection(Section, kw_only=True):
    transport: str = "auto"
    """auto, shm (one host), cuda_ipc (one GPU), nixl (across hosts) or checkpoint (a directory that all see)."""
    directory: str = ""
    """Of the checkpoint transport; empty is `<run folder>/weights`."""
    pause: str = "keep"
    """What becomes of samples under way when a policy is activated. keep: they go on under the new one, and their
    version spans say from which token. drain: they end first. abort: they are cut off, see `aborted`.
    overlap, with LoRA alone: they end under the adapters that they began with, beside new ones under the new."""
    aborted: str = "continue"
    """continue: what was sampled so far is the beginning of a new request. drop: the group is sampled anew."""
    deadline_s: PositiveFloat = 120.0
    """For a worker to prepare a policy, and again to activate it. Who takes longer is left out of that policy."""
    attempts: Positive = 3
    """Tries of a worker that could not prepare or activate a policy, before it is left out."""

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("pause", self.pause, PAUSES)
        check_choice("aborted", self.aborted, ABORTED)
