"""What a person watching a run is told: pure functions from the run's messages to lines of text."""

from collections.abc import Callable, Mapping

from beamline.coordinator.observe.view import RunView
from beamline.protocol.messages import (
    EvalResult,
    Heartbeat,
    Message,
    Metrics,
    Phase,
    PhaseName,
    ServiceFailed,
    StatusReply,
    WorkerState,
)

_PHASE_TIMINGS = ("generate", "score", "train", "sync", "evaluate", "checkpoint")

type Show = Callable[[str], None]


class Progress:
    """Turns messages into lines, each told once.

    Args:
        view: of the run, which whoever listens feeds.
        now: seconds since the run's start.
        num_workers: of the whole run; 0 where that is not known.
    """

    def __init__(self, view: RunView, now: Callable[[], float], num_workers: int = 0) -> None:
        self.view = view
        self.num_workers = num_workers
        self._phase = PhaseName.START
        self._now = now
        self._states: dict[str, tuple[str, WorkerState]] = {}
        self._left_out: dict[str, str] = {}

    def elapsed(self) -> str:
        """Seconds since the start, as every line of the set-up begins."""
        return f"{self._now():6.1f} s"

    def lines(self, message: Message) -> list[str]:
        """What to show for a message; nothing for one that tells nothing new."""
        match message:
            case Heartbeat():
                return self._worker(message)
            case Phase():
                return self._enter(message)
            case Metrics() if message.service == "coordinator" and "checkpoint/failed" in message.values:
                return [save_line(message.step, message.values)]
            case Metrics() if message.service == "coordinator" and "timing/step" in message.values:
                return [step_line(message.step, self.view.num_steps, message.values)]
            case EvalResult():
                return [eval_line(message)]
            case ServiceFailed():
                return failure_lines(message)
            case StatusReply():
                return self._leave_out(message.left_out)
            case _:
                return []

    def _worker(self, heartbeat: Heartbeat) -> list[str]:
        """Only the way to being ready is told: starting, then ready."""
        known = self._states.get(heartbeat.worker)
        was_ready = known is not None and known[1] is not WorkerState.STARTING
        if known is not None and known[0] == heartbeat.incarnation and (was_ready or known[1] is heartbeat.state):
            return []
        self._states[heartbeat.worker] = (heartbeat.incarnation, heartbeat.state)
        if heartbeat.state is WorkerState.STARTING:
            return [f"{self.elapsed()}  {heartbeat.worker} is starting"]
        return [f"{self.elapsed()}  {heartbeat.worker} is ready ({heartbeat.rss_bytes / 2**20:.0f} MiB)"]

    def _enter(self, phase: Phase) -> list[str]:
        begins = phase.phase is not self._phase and phase.phase in (PhaseName.EVALUATE, PhaseName.CHECKPOINT)
        self._phase = phase.phase
        return [f"{phase.phase} policy {phase.policy_version}"] if begins else []

    def _leave_out(self, left_out: Mapping[str, str]) -> list[str]:
        """Who is left out newly, and who has caught up."""
        before, self._left_out = self._left_out, dict(left_out)
        gone = [f"the run goes on without {w}: {why}" for w, why in left_out.items() if before.get(w) != why]
        return gone + [f"{worker} has caught up" for worker in before if worker not in left_out]


def failure_lines(failed: ServiceFailed) -> list[str]:
    """The last word of a service, with its traceback."""
    traceback = [f"  {line}" for line in failed.traceback.rstrip().splitlines()]
    return [f"{failed.worker} failed: {failed.error}", *traceback]


def step_line(step: int, num_steps: int, values: Mapping[str, float]) -> str:
    """A step in one line: `step  3/40  reward 0.412  ...  5.2 s (generate 2.1, train 2.6)`."""
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("accuracy", "reward/accuracy", ".1%"),
        ("length", "tokens/response_mean", ".1f"),
        ("mismatch", "policy/mismatch_abs_mean", ".1e"),
    ):
        if name in values:
            parts.append(f"{label} {values[name]:{form}}")
    if "sync/adapter_bytes" in values:
        parts.append(f"adapters {adapter_size(values)}")
    if "timing/step" in values:
        shares = ", ".join(
            f"{phase} {values[f'timing/{phase}']:.1f}" for phase in _PHASE_TIMINGS if values.get(f"timing/{phase}")
        )
        parts.append(f"{values['timing/step']:.1f} s" + (f" ({shares})" if shares else ""))
    return "  ".join(parts)


def adapter_size(values: Mapping[str, float]) -> str:
    """What a sync moves with LoRA: `0.24 MiB, 3.6% of the model`."""
    return f"{values['sync/adapter_bytes'] / 2**20:.2f} MiB, {values['sync/adapter_share']:.1%} of the model"


def save_line(step: int, values: Mapping[str, float]) -> str:
    """What came of a save in one line: `saved policy 6  12.3 MiB in 0.4 s`."""
    if values["checkpoint/failed"]:
        return f"policy {step} is NOT saved, and the run goes on: logs/coordinator.log says why"
    size = f"  {values['checkpoint/num_bytes'] / 2**20:.1f} MiB" if "checkpoint/num_bytes" in values else "  exported"
    return f"saved policy {step}{size} in {values['checkpoint/save_s']:.1f} s"


def eval_line(result: EvalResult) -> str:
    """An evaluated set in one line; accuracies are shares of 1."""
    values = result.values
    interval = ""
    if "accuracy_low" in values and "accuracy_high" in values:
        interval = f" [{values['accuracy_low']:.1%}, {values['accuracy_high']:.1%}]"
    accuracy = f"{values['accuracy']:.1%}{interval}" if "accuracy" in values else str(dict(values))
    return (
        f"eval {result.name} of policy {result.policy_version}: accuracy {accuracy} "
        f"({result.num_problems} problems, {result.num_samples} each)"
    )
