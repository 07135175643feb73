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
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines: list[MetricsLine] = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(_decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number} is not a metrics record ({error}): delete that line") from error
    return lines


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
