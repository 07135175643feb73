"""The runs of a folder, for the list of them and for the newest."""

import difflib
from pathlib import Path

import msgspec

from beamline.coordinator.launch.run_folder import LOCK_FILE, in_use
from beamline.coordinator.summary import iso
from beamline.protocol.errors import ConfigError

LEAVES = (LOCK_FILE, "config.json", "metrics.jsonl", "summary.json")
"""One of them is left of any run that can be shown."""


class _Ending(msgspec.Struct):
    """What of a summary the list shows."""

    status: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the list."""

    name: str
    status: str
    changed: float
    """When something in its folder was written last, Unix seconds."""

    @property
    def changed_text(self) -> str:
        return iso(self.changed).replace("T", " ").removesuffix("Z")


def is_run(path: Path) -> bool:
    """Whether a folder has anything of a run, however little of it is left."""
    return any((path / name).is_file() for name in LEAVES)


def list_runs(runs: Path) -> list[Listed]:
    """The runs of a folder, newest first."""
    folders = [path for path in runs.iterdir() if path.is_dir() and is_run(path)] if runs.is_dir() else []
    found = [Listed(name=path.name, status=_status(path), changed=_changed(path)) for path in folders]
    return sorted(found, key=lambda run: run.changed, reverse=True)


def find(run: str, runs: Path) -> Path:
    """A run's folder by its name or its path, half removed ones too. Raises ConfigError with the nearest name."""
    for path in (runs / run, Path(run)):
        if run and is_run(path):
            return path.resolve()
    names = [found.name for found in list_runs(runs)]
    if nearest := difflib.get_close_matches(run, names, n=1, cutoff=0.3):
        raise ConfigError(f"no run is called {run!r} in {runs}: the nearest is {nearest[0]!r}")
    known = f"it has {', '.join(sorted(names))}" if names else "it has none; `beamline run RECIPE` starts one"
    raise ConfigError(f"no run is called {run!r} in {runs}: {known}")


def _status(path: Path) -> str:
    if in_use(path):
        return "running"
    try:
        return msgspec.json.decode((path / "summary.json").read_bytes(), type=_Ending).status
    except (FileNotFoundError, msgspec.DecodeError):
        return "broken off"


def _changed(path: Path) -> float:
    return max(file.stat().st_mtime for name in LEAVES if (file := path / name).is_file())
