"""`metrics.jsonl`: one line a record, appended, and the source from which a summary is made."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from beamline.protocol.errors import ConfigError


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values of one step. `time` is Unix time in seconds; names and units are in docs/metrics.md."""

    step: int
    time: float
    values: dict[str, float]


_decoder = msgspec.json.Decoder(MetricsLine)
_encoder = msgspec.json.Encoder()


class MetricsFile:
    """An append-only file that outlives its writer.

    Opening one repairs its end: a last line that a killed writer left unfinished is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _repair(path)

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Append one line by a single write, so that a reader sees all of it or nothing. Values must be finite."""
        line = _encoder.encode(MetricsLine(step=step, time=time, values=dict(values))) + b"\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line)

    def read(self) -> list[MetricsLine]:
        return read_metrics(self.path)


def read_metrics(path: Path) -> list[MetricsLine]:
    """All whole lines in order of writing; an unfinished last one is left out, so a live file can be read.

    Raises:
        ConfigError: a line that is not a record, with its number.
    """
    return MetricsTail(path).read()


class MetricsTail:
    """Reads a file as it grows; from the start once it is another file, as after a run went on from an earlier step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._num_bytes = self._num_lines = 0

    def read(self) -> list[MetricsLine]:
        """The whole lines that were added since the last call. Raises as `read_metrics`."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._num_bytes, self._num_lines = inode, 0, 0
            file.seek(self._num_bytes)
            whole, end, _ = file.read().rpartition(b"\n")
        self._num_bytes += len(whole) + len(end)
        return [self._decode(line) for line in whole.splitlines()]

    def _decode(self, line: bytes) -> MetricsLine:
        self._num_lines += 1
        try:
            return _decoder.decode(line)
        except msgspec.DecodeError as error:
            where = f"{self._path} line {self._num_lines}"
            raise ConfigError(f"{where} is not a metrics record ({error}): delete that line") from error


def _repair(path: Path) -> None:
    """End the file after its last whole record."""
    content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return
    try:
        _decoder.decode(tail)
    except msgspec.DecodeError:
        os.truncate(path, len(content) - len(tail))
    else:
        with path.open("ab", buffering=0) as file:
            file.write(b"\n")
