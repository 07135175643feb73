"""From what a user calls a run to its folder."""

import difflib
from pathlib import Path

from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.protocol.errors import ConfigError

RUNS = Path("runs")


def find_run(run: str, runs: Path = RUNS) -> Path:
    """A run's folder, by its name under `runs` or by its path. Raises ConfigError with the nearest name."""
    for path in (runs / run, Path(run)):
        if (path / LOCK_FILE).is_file():
            return path.resolve()
    for path in (runs / run, Path(run)):
        if (path / "config.json").is_file():
            raise ConfigError(f"{path} was a run's folder, but its {LOCK_FILE} is gone: nobody can tell how it stands")
    names = sorted(path.parent.name for path in runs.glob(f"*/{LOCK_FILE}"))
    nearest = difflib.get_close_matches(run, names, n=1, cutoff=0.3)
    if nearest:
        raise ConfigError(f"no run is called {run!r} in {runs}: the nearest is {nearest[0]!r}")
    known = f"it has {', '.join(names)}" if names else "it has none; `beamline run RECIPE` starts one"
    raise ConfigError(f"no run is called {run!r} in {runs}: {known}")
