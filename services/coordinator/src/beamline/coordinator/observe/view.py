"""How a run stands, as whoever listens to its bus knows it: a pure state machine without a clock and without I/O."""

from collections import deque
from collections.abc import Iterable
from statistics import fmean

import msgspec

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

NUM_KEPT_STEPS = 64
NUM_KEPT_FAILURES = 20
NUM_ESTIMATED_FROM = 5
"""The newest steps, whose mean is what the coming ones are expected to take."""

_BETWEEN_STEPS = ("timing/step", "timing/evaluate", "timing/checkpoint")
"""What a step costs in all."""


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker by its newest heartbeat."""

    heartbeat: Heartbeat
    seen: float
    """When it was heard, in Unix seconds: here, or by the coordinator."""

    @property
    def has_started(self) -> bool:
        return self.heartbeat.state is not WorkerState.STARTING


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last word of a worker, and when it was heard (Unix seconds)."""

    time: float
    failed: ServiceFailed


class RunView:
    """Feed it every message that a user `cli` may hear; then read its attributes.

    Args:
        num_steps: steps of the whole run; a run that was asked to stop says fewer.
    """

    def __init__(self, num_steps: int = 0) -> None:
        self.num_steps = num_steps
        self.phase = PhaseName.START
        self.phase_since: float | None = None
        """When this phase was first heard of, Unix seconds: it may have begun earlier."""
        self.policy_version = 0
        """The newest policy, which is also the number of steps that are done."""
        self.paused = False
        self.waiting_for = ""
        """What the coordinator waits for, when it was last asked."""
        self.ledger: dict[str, int] = {}
        """Groups by their ends, as `StatusReply.ledger`, when the coordinator was last asked."""
        self.workers: dict[str, SeenWorker] = {}
        self.left_out: dict[str, str] = {}
        """Workers without which the run goes on, each with the reason."""
        self.gauges: dict[str, dict[str, float]] = {}
        """Live values by worker, under the names of `metric_schema`."""
        self.told: dict[str, float] = {}
        """When each worker last told live values, Unix seconds."""
        self.steps: dict[int, dict[str, float]] = {}
        """Values of the newest steps, all services together."""
        self.evaluations: dict[str, EvalResult] = {}
        """The newest of each data source."""
        self.failures: deque[Failure] = deque(maxlen=NUM_KEPT_FAILURES)
        self._last_end: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether the coordinator has said that the run is over."""
        return self.phase is PhaseName.DONE

    @property
    def step(self) -> int:
        """The step under way, or the last one."""
        return min(self.policy_version + 1, self.num_steps) if self.num_steps else self.policy_version + 1

    def apply(self, message: Message, now: float) -> None:
        """Take one message; `now` is Unix time in seconds. Of what tells nothing about a run, nothing is taken."""
        match message:
            case Phase():
                self._enter(message, now)
            case Heartbeat():
                self.workers[message.worker] = SeenWorker(heartbeat=message, seen=now)
            case Metrics() if message.step < 0:
                self.gauges.setdefault(message.worker, {}).update(message.values)
                self.told[message.worker] = now
            case Metrics():
                self._record(message, now)
            case EvalResult():
                known = self.evaluations.get(message.name)
                if known is None or message.step >= known.step:
                    self.evaluations[message.name] = message
            case ServiceFailed():
                self.failures.append(Failure(time=now, failed=message))
            case StatusReply():
                self._take_status(message, now)
            case _:
                pass

    def age_s(self, worker: str, now: float) -> float:
        """Seconds since the worker's last heartbeat."""
        return max(0.0, now - self.workers[worker].seen)

    def gauge(self, name: str) -> dict[str, float]:
        """A live value by worker, of those that tell it."""
        return {worker: values[name] for worker, values in self.gauges.items() if name in values}

    def last_values(self) -> dict[str, float]:
        """Values of the newest step that is over; of the newest one at all before that."""
        over = [step for step, values in self.steps.items() if "timing/step" in values]
        newest = max(over or self.steps, default=None)
        return {} if newest is None else self.steps[newest]

    def left_s(self, now: float) -> float | None:
        """Seconds that the rest of the run will take, if its steps go on as the newest did; None before the first."""
        taken = [values for _, values in sorted(self.steps.items()) if "timing/step" in values][-NUM_ESTIMATED_FROM:]
        if not taken or not self.num_steps:
            return None
        a_step = fmean(_sum(values, _BETWEEN_STEPS) for values in taken)
        begun = min(now - self._last_end, a_step) if self._last_end is not None else 0.0
        num_left = max(0, self.num_steps - self.policy_version)
        return max(0.0, num_left * a_step - begun)

    def _enter(self, phase: Phase, now: float) -> None:
        if phase.phase is not self.phase or self.phase_since is None:
            self.phase_since = now
        self.phase = phase.phase
        self.policy_version = max(self.policy_version, phase.policy_version)

    def _record(self, message: Metrics, now: float) -> None:
        self.steps.setdefault(message.step, {}).update(message.values)
        for old in sorted(self.steps)[:-NUM_KEPT_STEPS]:
            del self.steps[old]
        if "timing/step" in message.values:
            self.policy_version = max(self.policy_version, message.step)
            self._last_end = now

    def _take_status(self, status: StatusReply, now: float) -> None:
        self.num_steps = status.num_steps
        self.policy_version = max(self.policy_version, status.policy_version)
        self.paused = status.paused
        self.waiting_for = status.waiting_for
        self.ledger = status.ledger
        self.left_out = status.left_out
        if self.phase_since is None:
            self.phase = status.phase
        if status.phase is self.phase:
            self.phase_since = status.phase_since or now
        for heartbeat in status.workers:
            seen = now - status.silences_s.get(heartbeat.worker, 0.0)
            self.workers.setdefault(heartbeat.worker, SeenWorker(heartbeat=heartbeat, seen=seen))


def _sum(values: dict[str, float], names: Iterable[str]) -> float:
    return sum(values.get(name, 0.0) for name in names)
