"""Log records as JSON lines on standard error, each with the step and the span in which it was written.

What libraries print by themselves stays as it is, between these lines.
"""

import logging
import sys
from datetime import UTC, datetime

import msgspec
from opentelemetry import trace

from beamline.runtime.trace_context import current_step


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `logs/<worker>.log`."""

    time: str
    """ISO 8601 in UTC, with milliseconds."""
    level: str
    worker: str
    logger: str
    message: str
    step: int | None = None
    trace_id: str = ""
    """32 hexadecimal digits; empty outside a span."""
    span_id: str = ""
    """16 hexadecimal digits."""
    exception: str = ""
    """A traceback, with the error in its last line."""


class JsonFormatter(logging.Formatter):
    """Formats records as `LogLine`s of one worker."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker
        self._encoder = msgspec.json.Encoder()

    def format(self, record: logging.LogRecord) -> str:
        span, step = trace.get_current_span().get_span_context(), current_step()
        line = LogLine(
            time=utc(record.created),
            level=record.levelname,
            worker=self._worker,
            logger=record.name,
            message=_encodable(record.getMessage()),
            step=int(step) if step.isdecimal() else None,
            trace_id=trace.format_trace_id(span.trace_id) if span.is_valid else "",
            span_id=trace.format_span_id(span.span_id) if span.is_valid else "",
            exception=_encodable(self.formatException(record.exc_info)) if record.exc_info else "",
        )
        return self._encoder.encode(line).decode()


def set_up_logging(worker: str) -> None:
    """Send what this process logs, and Python's warnings, to standard error as lines of `worker`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(worker))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(True)


def utc(unix_s: float) -> str:
    """Unix time in seconds as `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _encodable(text: str) -> str:
    """Half a surrogate pair, as broken file names have it, is no UTF-8."""
    return text.encode(errors="backslashreplace").decode()
