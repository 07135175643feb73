"""What can be seen of a run from outside: the input of `stuck`, as `stuck_gather` collects it."""

import msgspec

from beamline.protocol.messages import Heartbeat, ServiceFailed, StatusReply
from beamline.runtime.process_state import ProcessState


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run: a worker, the broker or the launcher."""

    name: str
    pid: int | None = None
    """None where nobody has noted one."""
    process: ProcessState | None = None
    """None where it has ended, or where no pid is known."""
    stopped: list[ProcessState] = []
    """The stopped ones among it and what it started."""
    heartbeat: Heartbeat | None = None
    """The newest that is known."""
    silence_s: float | None = None
    """Since that heartbeat; None where that is not known."""
    log: str = ""
    last_lines: list[str] = []

    @property
    def has_ended(self) -> bool:
        """A process was noted, and is no more."""
        return self.pid is not None and self.process is None


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A file system that the run writes to."""

    holds: str
    """In words, such as "blobs"."""
    path: str
    num_bytes: int
    free_bytes: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Times are Unix seconds."""

    run: str
    now: float
    listened_s: float = 0.0
    """How long the bus was listened to."""
    bus_error: str = ""
    """Why the bus could not be listened to; empty where it was."""
    status: StatusReply | None = None
    """The coordinator's answer, if it gave one."""
    coordinator_error: str = ""
    """Why it gave none."""
    moved: bool = False
    """Whether phase, step or ledger changed while the bus was listened to."""
    workers: list[WorkerFacts] = []
    """The coordinator among them."""
    broker: WorkerFacts | None = None
    """None where the broker is the user's own."""
    launcher: WorkerFacts | None = None
    stores: list[StoreFacts] = []
    failures: list[ServiceFailed] = []
    """Heard while listening."""
    missing: list[str] = []
    """Files of the run's folder that are not there any more."""
