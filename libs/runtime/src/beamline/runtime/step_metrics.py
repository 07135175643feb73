"""What a worker tells of its work in numbers, under the names of the metric schema: live, and one message a step."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import Heartbeat, Message, Metrics, Phase, PhaseName

log = logging.getLogger(__name__)

LIVE = -1
"""The step of live numbers."""
_AFTER_A_STEP = (PhaseName.GENERATE, PhaseName.DONE)
"""Phases that begin when all that belongs to the newest policy's step is over, its evaluation too."""
_WITHIN_A_STEP = (PhaseName.SYNC, PhaseName.CHECKPOINT, PhaseName.EVALUATE)
"""Phases that belong to the step of the newest policy."""

type Gauges = Callable[[], Mapping[str, float]]
"""Present values of a service."""


def live_metrics(heartbeat: Heartbeat, gauges: Iterable[Gauges]) -> Metrics:
    """The gauges of a worker, and what its heartbeat says under the names of the schema."""
    worker = heartbeat.worker
    values = {
        f"resources/rss_bytes/{worker}": float(heartbeat.rss_bytes),
        f"workers/in_flight/{worker}": float(heartbeat.in_flight),
    }
    for read in gauges:
        values.update(read())
    if heartbeat.policy_version >= 0:
        values[f"workers/policy_version/{worker}"] = float(heartbeat.policy_version)
    return Metrics(service=heartbeat.service, worker=worker, step=LIVE, values=values)


class StepMetrics:
    """Publishes what a worker did in each step, as soon as a phase says that the step is over.

    A step's message holds what was done since the message before, evaluations included. A worker that starts in the
    middle of a run tells of the steps that end from then on.

    Args:
        service: of the worker.
        worker: its name.
        publish: sends a message.
        take: what was done since it was last asked, under the names of the schema.
    """

    def __init__(self, service: str, worker: str, publish: Callable[[Message], Awaitable[None]], take: Gauges) -> None:
        self._service = service
        self._worker = worker
        self._publish = publish
        self._take = take
        self._next: int | None = None
        """Step of the next message; None before the first phase."""

    async def on_phase(self, phase: Phase) -> None:
        """Take a phase; one that says nothing new publishes nothing."""
        is_over = phase.phase in _AFTER_A_STEP
        if self._next is None:
            self._next = phase.policy_version + (phase.phase not in _WITHIN_A_STEP)
        while is_over and self._next <= phase.policy_version:
            message = Metrics(service=self._service, worker=self._worker, step=self._next, values=dict(self._take()))
            self._next += 1
            try:
                await self._publish(message)
            except BeamlineError as error:
                log.warning("the numbers of step %d are lost: %s", message.step, error)
