"""A checkpoint's policy as a Hugging Face directory of its own."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from beamline.protocol.errors import WeightError
from beamline.runtime.checkpoints import ADAPTER, POLICY, resolve

_READ_BYTES = 16 * 1024 * 1024
_WEIGHTS = ".safetensors"

type Place = Callable[[Path, Path], None]
"""Makes the second file of the first."""


def export(checkpoint: Path, directory: Path, place: Place | None = None) -> Path:
    """Copy a checkpoint's policy into `directory`, new or empty; verified before and after.

    Raises WeightError for a damaged checkpoint, one of adapters alone, or a directory that is not empty.
    """
    folder = resolve(checkpoint)
    if (folder / ADAPTER).is_dir() and not (folder / POLICY).is_dir():
        raise WeightError(
            f"checkpoint {folder} holds adapters alone, which cannot be exported as a model: export the checkpoint of "
            "a run that trained all weights"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise WeightError(f"{directory} is not empty: export into a new directory")
    place_policy(folder / POLICY, directory, place or copy_checked)
    return directory


def place_policy(policy: Path, directory: Path, place: Place) -> None:
    """All files of a policy's directory, in another one."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in sorted(policy.iterdir()):
        place(source, directory / source.name)


def copy_checked(source: Path, target: Path) -> None:
    """Raises WeightError where the copy is not what was read."""
    shutil.copyfile(source, target)
    if _hash(target) != _hash(source):
        raise WeightError(f"{target} differs from {source} after copying: the disk is full or failing")


def link_or_copy(source: Path, target: Path) -> None:
    """Weights by a hard link where the filesystem can; a copy of all else, which people may want to change."""
    if source.suffix == _WEIGHTS:
        try:
            os.link(source, target)
            return
        except OSError:
            pass  # another filesystem, or one without links
    copy_checked(source, target)


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
