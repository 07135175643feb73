"""The traces of a run: one a step, one for its start and one for its end. Their roots are opened here.

Ids follow from the run and the step, so that a coordinator that is started again goes on with the step's trace.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import baggage, context, trace
from opentelemetry.context import Context

from beamline.coordinator.state import RunState
from beamline.runtime.trace_context import GROUP_ID, STEP, traceparent
from beamline.runtime.trace_ids import RootIds, given_ids

tracer = trace.get_tracer(__name__)


class Traces:
    """Spans of all loops of the coordinator hang in the trace that its main loop has open."""

    def __init__(self, run: str, state: RunState) -> None:
        self._run = run
        self._state = state
        self._open = Context()
        """Of the root that was opened last."""

    @contextmanager
    def start(self) -> Iterator[None]:
        """Of this process: until the first step."""
        with self._root("start", self._state.boots, is_continued=False):
            yield

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Of everything that is done for a step."""
        with self._root("step", step, step):
            yield

    @contextmanager
    def finish(self) -> Iterator[None]:
        """Of the run's end."""
        with self._root("finish", 0):
            yield

    @contextmanager
    def admit(self, group_id: str, attempt: int) -> Iterator[str]:
        """Of issuing a group. Gives the context that its work hangs on, as a traceparent."""
        attributes = {GROUP_ID: group_id, "beamline.attempt": attempt}
        with tracer.start_as_current_span("admit", context=self._open, attributes=attributes):
            yield traceparent()

    def mark(self, name: str, attributes: Mapping[str, str | int]) -> None:
        """A moment of the trace that is open."""
        tracer.start_span(name, context=self._open, attributes=attributes).end()

    @contextmanager
    def _root(self, name: str, number: int, step: int | None = None, *, is_continued: bool = True) -> Iterator[None]:
        """What is cut short leaves its root to the process that goes on with it, where one does."""
        attributes = {"beamline.run": self._run} | ({} if step is None else {STEP: step})
        with given_ids(RootIds.of(self._run, self._state.launched, name, number)):
            span = tracer.start_span(name, context=Context(), attributes=attributes)
        outside = Context() if step is None else baggage.set_baggage(STEP, str(step), Context())
        token, is_left = context.attach(outside), False
        try:
            with trace.use_span(span):
                self._open = context.get_current()
                yield
        except asyncio.CancelledError:
            is_left = is_continued
            raise
        finally:
            context.detach(token)
            if not is_left:
                span.end()
