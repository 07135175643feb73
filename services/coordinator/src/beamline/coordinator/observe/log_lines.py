"""A worker's log, line by line, as records: its own JSON lines, the broker's lines, and whatever libraries print.

A line that is no record takes the time of the record before it. A Python traceback counts as an error to its end; so
does a service's reason for not starting, `error: ...`; other such lines count as information.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from beamline.runtime.json_log import LogLine, utc

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
NUM_TAIL_BYTES = 64 * 1024

_BEGIN = b'{"time":"'
_decoder = msgspec.json.Decoder(LogLine)
_NATS = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) \[([A-Z]{3})\] ?(.*)")
_NATS_LEVELS = {"DBG": "DEBUG", "TRC": "DEBUG", "WRN": "WARNING", "ERR": "ERROR", "FTL": "CRITICAL"}
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TRACEBACK = "Traceback (most recent call last)"
_REFUSAL = "error: "


class LogReader:
    """Makes records of one log's lines, given in order.

    Args:
        worker: whose log it is, for lines that do not say so.
        began: time of lines that stand before the first record, as `LogLine.time`.
    """

    def __init__(self, worker: str, began: str = "") -> None:
        self._worker = worker
        self._time = began
        self._in_traceback = False

    def read(self, line: bytes) -> Iterator[LogLine]:
        """The records of a line without its end; none for an empty one, two where a print was not ended."""
        before, begin, rest = line.partition(_BEGIN)
        record = _record(begin + rest) if begin else None
        if record is None:
            before = line
        if text := printable(before):
            yield self._raw(text)
        if record is not None:
            self._in_traceback = False
            self._time = max(self._time, record.time)
            yield record

    def _raw(self, text: str) -> LogLine:
        if found := _NATS.fullmatch(text):
            self._time = max(self._time, utc(datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").timestamp()))
            level = _NATS_LEVELS.get(found[2], "INFO")
            return LogLine(
                time=self._time, level=level, worker=self._worker, logger="nats-server", message=text_of(found[3])
            )
        starts = text.startswith(_TRACEBACK)
        is_error = starts or self._in_traceback or text.startswith(_REFUSAL)
        self._in_traceback = starts or (self._in_traceback and text.startswith(" "))
        level = "ERROR" if is_error else "INFO"
        return LogLine(time=self._time, level=level, worker=self._worker, logger="", message=text)


def read_lines(worker: str, lines: Iterable[bytes]) -> Iterator[LogLine]:
    """All records of a log."""
    reader = LogReader(worker)
    for line in lines:
        yield from reader.read(line.rstrip(b"\n"))


def tail(log: Path, num_bytes: int = NUM_TAIL_BYTES) -> list[str]:
    """The end of a worker's log as a person reads it, a line each; empty where there is none."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        start = max(0, log.stat().st_size - num_bytes)
        file.seek(start)
        lines = file.read().split(b"\n")
    whole = lines[1:] if start and any(lines[1:]) else lines
    return [text for record in read_lines(log.stem, whole) for text in shown(record)]


def shown(record: LogLine) -> list[str]:
    """A record without its worker, as lines: `12:00:00.000 INFO logger: message`, then its traceback."""
    text = [*record.message.splitlines(), *record.exception.splitlines()] or [""]
    if not record.logger:
        return text
    return [f"{record.time[11:23]} {record.level} {record.logger}: {text[0]}", *text[1:]]


def printable(line: bytes) -> str:
    """What is left on a terminal of a line that may move its cursor; never a control character."""
    return text_of(line.decode(errors="replace").rstrip().rpartition("\r")[2])


def text_of(text: str) -> str:
    """Text without control characters, tabs and line ends kept."""
    return _CONTROL.sub("", text)


def _record(line: bytes) -> LogLine | None:
    """None for a damaged line."""
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return msgspec.structs.replace(record, message=text_of(record.message), exception=text_of(record.exception))
