"""`beamline compare`: from two runs' names to what is printed."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from beamline.coordinator.compare import Comparison, compare
from beamline.coordinator.compare_sides import read_side
from beamline.coordinator.compare_text import sentences
from beamline.coordinator.launch.find_run import find_run
from beamline.coordinator.progress_bar import working
from beamline.protocol.errors import ConfigError


def compare_runs(first: str, second: str, runs: Path, metrics: Sequence[str]) -> Comparison:
    """Compare two runs that have ended.

    Args:
        first, second: names under `runs`, or folders.

    Raises:
        ConfigError: no such run, one that has not ended, the same one twice, or as `compare`.
    """
    folders = [find_run(run, runs) for run in (first, second)]
    if folders[0] == folders[1]:
        raise ConfigError(f"{folders[0]} is given twice: name two runs")
    names = [folder.name for folder in folders]
    if names[0] == names[1]:
        names = [first, second]
    with working(f"reading {names[0]} and {names[1]}") as work:
        sides = [read_side(name, folder) for name, folder in zip(names, folders, strict=True)]
        work.part(f"comparing {names[0]} and {names[1]}")
        return compare(sides[0], sides[1], metrics)


def as_json(comparison: Comparison) -> str:
    """Everything, the sentences included."""
    content = {"sentences": sentences(comparison), **msgspec.structs.asdict(comparison)}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
