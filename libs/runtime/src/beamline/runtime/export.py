"""What a checkpoint holds as a directory of its own: a policy, adapters, or a model with them merged into it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from beamline.protocol.errors import WeightError
from beamline.runtime.adapter_merge import adapters_in, merge
from beamline.runtime.checkpoint_manifest import Advance, Entry, hash_of, read_manifest
from beamline.runtime.checkpoints import ADAPTER, TrainerState, draft_of, holding, resolve, trainer_state
from beamline.runtime.model_description import describe

_WEIGHTS = ".safetensors"


def export(checkpoint: Path, directory: Path, advance: Advance = lambda _: None) -> Path:
    """Copy a checkpoint's policy or adapters into `directory`, new or empty, which is there when it is complete.

    What was copied is read again and compared with the manifest; what else the checkpoint holds is not read.

    Args:
        checkpoint: its folder, or that of all checkpoints for the newest.
        advance: told of the bytes that were read to compare.

    Raises:
        WeightError: a damaged checkpoint, a directory that is not empty, or a disk that fails.
    """
    folder = resolve(checkpoint, deep=False)

    def fill(draft: Path) -> None:
        for entry in exported_files(folder):
            _copy(folder, entry, draft, advance)

    return _filled(directory, fill, sum(entry.num_bytes for entry in exported_files(folder)))


def export_merged(
    checkpoint: Path, directory: Path, base: Path | None = None, advance: Advance = lambda _: None
) -> Path:
    """Likewise the model that a checkpoint's adapters were trained on, with them merged into it.

    Args:
        base: where that model lies now; where it lay then if not given.
        advance: told of the bytes of the model that are done.

    Raises:
        WeightError: as `export`; or the checkpoint has no adapters, or the model is not the one that they are of.
    """
    folder = resolve(checkpoint, deep=False)
    state = trainer_state(folder)
    if state is None or state.base is None or state.lora is None:
        raise WeightError(f"checkpoint {folder} holds a whole policy and no adapters: export it without merging")
    model = _base_of(folder, state, base)
    adapters = adapters_in(model, state.lora)
    for entry in exported_files(folder):
        _check(folder / entry.path, entry, folder)

    def fill(draft: Path) -> None:
        describe(model, draft)
        merge(model, adapters, folder / ADAPTER, draft, advance)

    return _filled(directory, fill, sum(path.stat().st_size for path in model.glob(f"*{_WEIGHTS}")))


def exported_files(folder: Path) -> list[Entry]:
    """What of a checkpoint is exported."""
    return [entry for entry in read_manifest(folder).files if entry.path.startswith(f"{holding(folder)}/")]


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


def _base_of(folder: Path, state: TrainerState, base: Path | None) -> Path:
    """Raises WeightError: the model is not there, or is not the one that the adapters are of."""
    assert state.base is not None
    model = base or Path(state.base.path)
    if not model.is_dir():
        raise WeightError(
            f"{model} is not there, and the adapters of checkpoint {folder} were trained on {state.base.path}: say "
            "where that model lies now with --base DIR"
        )
    resolve(folder, deep=False, model=model)
    return model


def _filled(directory: Path, fill: Callable[[Path], None], num_bytes: int) -> Path:
    target = directory.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightError(f"{directory} is not empty: export into a new directory")
    draft = draft_of(target)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        fill(draft)
        draft.rename(target)
    except OSError as error:
        free = shutil.disk_usage(next(parent for parent in target.parents if parent.exists())).free
        raise WeightError(
            f"{directory} came to nothing: {error.strerror}; the export takes about {num_bytes:,} bytes, and {free:,} "
            "are free there"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _copy(folder: Path, entry: Entry, draft: Path, advance: Advance) -> None:
    source = folder / entry.path
    target = draft / source.relative_to(folder / holding(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    if hash_of(target, advance) != entry.xxh3_128:
        resolve(folder)  # says so where the checkpoint is damaged, and names another
        raise WeightError(f"{target} differs from {source} after copying: the disk is failing")


def _check(path: Path, entry: Entry, folder: Path) -> None:
    if hash_of(path) != entry.xxh3_128:
        resolve(folder)
        raise WeightError(f"{path} could not be read twice alike: the disk is failing")
