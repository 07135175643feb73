"""Spans of a run as its services wrote them: `<run folder>/traces/<worker>.jsonl`, lines of OTLP/JSON."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from beamline.protocol.errors import ConfigError, ProtocolError
from beamline.runtime.otlp_json import ResourceSpans, SpanLine, decode_line, plain

log = logging.getLogger(__name__)

SERVICE_PREFIX = "beamline-"
"""Of `service.name`."""

type Attributes = dict[str, str | int | float | bool]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A span that another one refers to without being its child."""

    trace_id: str
    span_id: str
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work of one worker. Ids are in hexadecimal, times are Unix nanoseconds."""

    name: str
    service: str
    worker: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    """Empty for a root."""
    start_ns: int
    end_ns: int
    attributes: Attributes = {}
    links: list[Link] = []
    error: str = ""
    """Why it failed, where it did."""


class SpanFiles:
    """The traces of a run, read as they grow. Spans of one worker come in the order in which they ended.

    Args:
        newest_bytes: begin that far before the end of a file that is longer; 0 reads it from its beginning.
    """

    def __init__(self, run_dir: Path, newest_bytes: int = 0) -> None:
        self._folder = run_dir / "traces"
        self._newest_bytes = newest_bytes
        self._read: dict[str, int] = {}
        """Bytes that were read, by file."""
        self.num_damaged: dict[str, int] = {}
        """Lines that could not be read, by file."""

    def new(self) -> Iterator[Span]:
        """Spans of the whole lines that were added since this was last called; files may come and go."""
        for path in sorted(self._folder.glob("*.jsonl")):
            yield from self._new_of(path)

    def num_bytes_left(self) -> int:
        """Of last lines that have no end: their worker still writes them, or was killed over it."""
        return sum(_size(self._folder / name) - num_bytes for name, num_bytes in self._read.items())

    def _new_of(self, path: Path) -> Iterator[Span]:
        try:
            with path.open("rb") as file:
                if path.name not in self._read:
                    self._read[path.name] = self._begin(path, file)
                file.seek(self._read[path.name])
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._read[path.name] = file.tell()
                    yield from self._spans_of(path.name, line)
        except FileNotFoundError:  # the folder is being removed
            return

    def _begin(self, path: Path, file: BinaryIO) -> int:
        """Where the first line that is wanted starts."""
        too_many = _size(path) - self._newest_bytes
        if not self._newest_bytes or too_many <= 0:
            return 0
        file.seek(too_many - 1)
        file.readline()
        return file.tell()

    def _spans_of(self, name: str, line: bytes) -> list[Span]:
        worker = name.removesuffix(".jsonl")  # a process that it forked calls its instance otherwise
        try:
            return [span for resource in decode_line(line).resource_spans for span in _spans(resource, worker)]
        except (ProtocolError, ValueError):
            self.num_damaged[name] = self.num_damaged.get(name, 0) + 1
            return []


def read_spans(run_dir: Path) -> Iterator[Span]:
    """All spans of a run, live or ended. Damaged lines are left out, and logged with their number.

    Raises ConfigError, at the first span: the run has written no traces.
    """
    if not (run_dir / "traces").is_dir():
        raise ConfigError(
            f"{run_dir} has no folder `traces`: the run was started with telemetry.traces=false, or it was removed"
        )
    files = SpanFiles(run_dir)
    yield from files.new()
    for name, number in files.num_damaged.items():
        log.warning("%s: %d damaged lines are left out", run_dir / "traces" / name, number)
    if num_bytes := files.num_bytes_left():
        log.warning("%s: the last %d bytes are no whole line, and left out", run_dir / "traces", num_bytes)


def _spans(resource: ResourceSpans, worker: str) -> Iterator[Span]:
    of = plain(resource.resource.attributes)
    service = str(of.get("service.name", "")).removeprefix(SERVICE_PREFIX)
    for scope in resource.scope_spans:
        for line in scope.spans:
            yield _span(line, service, worker)


def _span(line: SpanLine, service: str, worker: str) -> Span:
    return Span(
        name=line.name,
        service=service,
        worker=worker,
        trace_id=line.trace_id,
        span_id=line.span_id,
        parent_id=line.parent_span_id,
        start_ns=int(line.start_time_unix_nano),
        end_ns=int(line.end_time_unix_nano),
        attributes=plain(line.attributes),
        links=[
            Link(trace_id=link.trace_id, span_id=link.span_id, attributes=plain(link.attributes)) for link in line.links
        ],
        error=line.status.message or "failed" if line.status.code == _ERROR else "",
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


_ERROR = 2
"""OTLP's status code."""
