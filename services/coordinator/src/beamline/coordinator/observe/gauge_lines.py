"""Live gauges of a run as its coordinator heard them: `<run folder>/gauges.jsonl`."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class GaugeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one worker at one moment. `time` is Unix time in seconds; names are those of the metric schema."""

    time: float
    service: str
    worker: str
    values: dict[str, float]


_decoder = msgspec.json.Decoder(GaugeLine)


def read_gauges(run_dir: Path) -> Iterator[GaugeLine]:
    """Line by line, in order of time; none where the run wrote none. Damaged lines are left out, and logged."""
    path = run_dir / "gauges.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError as error:
                log.warning("%s line %d is left out: %s", path, number, error)
