"""A checkpoint's policy as a Hugging Face directory of its own."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from beamline.protocol.errors import WeightError
from beamline.runtime.checkpoint_manifest import Advance, Entry, hash_of, read_manifest
from beamline.runtime.checkpoints import ADAPTER, POLICY, draft_of, resolve

_WEIGHTS = ".safetensors"


def export(checkpoint: Path, directory: Path, advance: Advance = lambda _: None) -> Path:
    """Copy a checkpoint's policy into `directory`, new or empty, which is there when it is complete.

    What was copied is read again and compared with the manifest; what else the checkpoint holds is not read.

    Args:
        checkpoint: its folder, or that of all checkpoints for the newest.
        advance: told of the bytes that were read to compare.

    Raises:
        WeightError: a damaged checkpoint, one of adapters alone, or a directory that is not empty.
    """
    folder = resolve(checkpoint, deep=False)
    if not (folder / POLICY).is_dir():
        what = "adapters alone (LoRA)" if (folder / ADAPTER).is_dir() else "no policy"
        raise WeightError(
            f"checkpoint {folder} holds {what}, which makes no model: export the checkpoint of a run that trained all "
            "weights"
        )
    target = directory.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightError(f"{directory} is not empty: export into a new directory")
    draft = draft_of(target)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for entry in exported_files(folder):
            _copy(folder, entry, draft, advance)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def exported_files(folder: Path) -> list[Entry]:
    """What of a checkpoint is exported."""
    return [entry for entry in read_manifest(folder).files if entry.path.startswith(f"{POLICY}/")]


def place_policy(policy: Path, directory: Path, place: Callable[[Path, Path], None]) -> None:
    """All files of a policy's directory, in another one."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in sorted(policy.iterdir()):
        place(source, directory / source.name)


def link_or_copy(source: Path, target: Path) -> None:
    """Weights by a hard link where the filesystem can; a copy of all else, which people may want to change.

    Raises WeightError where a copy is not what was read.
    """
    if source.suffix == _WEIGHTS:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another filesystem, or one without links
    shutil.copyfile(source, target)
    if hash_of(target) != hash_of(source):
        raise WeightError(f"{target} differs from {source} after copying: the disk is failing")


def _copy(folder: Path, entry: Entry, draft: Path, advance: Advance) -> None:
    source = folder / entry.path
    target = draft / source.relative_to(folder / POLICY)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if hash_of(target, advance) != entry.xxh3_128:
        resolve(folder)  # says so where the checkpoint is damaged, and names another
        raise WeightError(f"{target} differs from {source} after copying: the disk is failing")
