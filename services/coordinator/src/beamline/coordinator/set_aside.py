"""A run that goes on from an earlier step tells no step twice: what its folder has of later ones is set aside.

Nothing is deleted. `superseded/<number>/` takes it, under the same names as in the run's folder.
"""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec

from beamline.coordinator.metrics_file import MetricsFile, MetricsLine
from beamline.coordinator.summary import write_atomically
from beamline.protocol.errors import BlobError
from beamline.runtime.sample_files import read_index

SUPERSEDED = "superseded"
_OF_THE_END = ("summary.json", "report.html")
_STEP = re.compile(r"global_step_(\d+)")


def set_aside(run_dir: Path, step: int) -> Path | None:
    """Move what the folder tells of steps after `step`, and of the run's end. Returns where it lies; None for nothing.

    To be called before anything is recorded. Whoever dies in the middle of it may call it again.

    Args:
        run_dir: the run's folder.
        step: the newest that still holds; -1 sets all of them aside.
    """
    whole = [path for path in _whole_files(run_dir, step) if path.exists()]
    lines = MetricsFile(run_dir / "metrics.jsonl").read()
    later = [line for line in lines if line.step > step]
    if not whole and not later:
        return None
    aside = next(folder for number in count(1) if not (folder := run_dir / SUPERSEDED / str(number)).exists())
    aside.mkdir(parents=True)
    for path in whole:
        target = aside / path.relative_to(run_dir)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    if later:
        write_atomically(aside / "metrics.jsonl", _encode(later))
        write_atomically(run_dir / "metrics.jsonl", _encode([line for line in lines if line.step <= step]))
    return aside


def _whole_files(run_dir: Path, step: int) -> Iterator[Path]:
    """Files and folders that are moved as they are."""
    yield from (run_dir / name for name in _OF_THE_END)
    for path in (*(run_dir / "samples").glob("global_step_*"), *(run_dir / "evals").glob("global_step_*")):
        found = _STEP.match(path.name)
        if found and int(found[1]) > step:
            yield path
    if (kept := run_dir / "doctor").is_dir() and _is_later(kept, step):
        yield kept


def _is_later(kept: Path, step: int) -> bool:
    """Whether the doctor's samples are of a later policy; what cannot be read is of no use to him either."""
    try:
        return read_index(kept).policy_version > step
    except BlobError:
        return True


def _encode(lines: list[MetricsLine]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
