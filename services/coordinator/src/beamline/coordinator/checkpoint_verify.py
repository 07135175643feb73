"""`beamline verify`: which checkpoints are meant, and what reading them to the last byte finds."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from beamline.coordinator.checkpoint_table import size_text
from beamline.coordinator.launch.find_run import find_run
from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.coordinator.progress_bar import Work
from beamline.protocol.errors import ConfigError
from beamline.runtime.checkpoint_manifest import MANIFEST, Unusable, read_manifest
from beamline.runtime.checkpoints import LATEST, STEP_PREFIX, checkpoints_of, damage, root_of
from beamline.runtime.run_files import read_config
from beamline.runtime.verification import Verification


@dataclass(frozen=True)
class Outcome:
    """Of one checkpoint."""

    line: str
    """For the user."""
    wrong: str
    """Empty for a whole one, and for one that is no longer there."""


def root_of_run(run_dir: Path) -> Path:
    """Where a run has its checkpoints, or will have them."""
    return root_of(run_dir, read_config(run_dir).trainer.checkpoint_path)


def meant(target: str, runs: Path) -> list[Path]:
    """The folders of the checkpoints that are meant: one, or all of a run or of a folder, newest first.

    Raises ConfigError for what is neither, with the nearest name, and for a run that has none.
    """
    path = Path(target)
    if path.name == LATEST or path.name.startswith(STEP_PREFIX) or (path / MANIFEST).is_file():
        return [_existing(path)]
    is_root = path.is_dir() and not (path / LOCK_FILE).is_file() and any(path.glob(f"{STEP_PREFIX}*"))
    root = path if is_root else root_of_run(find_run(target, runs))
    folders = [Path(facts.path) for facts in checkpoints_of(root) if not Path(facts.path).name.startswith(".")]
    if not folders:
        raise ConfigError(f"{target} has no checkpoint in {root} yet: trainer.checkpoint_interval says when it has one")
    return folders


def verified(folder: Path, work: Work) -> Outcome:
    """Read a checkpoint and remember beside it what was found."""
    num_bytes = 0
    with suppress(Unusable):
        num_bytes = read_manifest(folder).num_bytes
    work.part(f"reading {folder}", num_bytes)
    wrong = damage(folder, advance=work.advance)
    if not folder.is_dir():
        return Outcome(f"{folder}  is no longer there: the run has removed it meanwhile", "")
    remembered = ""
    try:
        Verification.remember(folder, wrong)
    except OSError as error:
        if (folder / MANIFEST).is_file():
            remembered = f" (which cannot be remembered there: {error.strerror})"
    return Outcome(f"{folder}  {wrong or f'whole, {size_text(num_bytes)}'}{remembered}", wrong)


def _existing(path: Path) -> Path:
    if path.is_dir():
        return path.resolve()
    others = [f"{STEP_PREFIX}{facts.step}" for facts in checkpoints_of(path.parent) if not facts.wrong]
    there = f"{path.parent} has {', '.join(others)}" if others else f"{path.parent} has no checkpoint"
    raise ConfigError(f"{path} is not there: {there}")
