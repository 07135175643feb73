"""Checkpoints on disk: `<root>/global_step_N/{policy, optimizer, trainer_state.json, manifest.json}`.

`policy` is a Hugging Face directory. The manifest, with size and hash of every file, is written last; the folder
takes its name when it is complete, and the link `latest` moves after that. So whatever has its name is whole,
unless it was damaged later, and that the manifest finds.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from beamline.protocol.errors import WeightError

MANIFEST = "manifest.json"
LATEST = "latest"
POLICY = "policy"
_STEP = "global_step_"
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
_READ_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class TrainerState:
    """What the trainer has to know beside weights and optimizer."""

    step: int
    dtype: str


def save(root: Path, model_dir: Path, state: TrainerState, write: Callable[[Path], None]) -> Path:
    """Write the checkpoint of `state.step` and return its folder; one that is there and whole is left as it is.

    Args:
        model_dir: Hugging Face directory whose configuration and tokenizer the policy takes over.
        write: writes weights and optimizer into a folder (`Policy.save`).
    """
    final = root / f"{_STEP}{state.step}"
    if final.is_dir() and not damage(final):
        return final
    draft = root / f".{final.name}.draft"
    for leftover in (draft, final):
        shutil.rmtree(leftover, ignore_errors=True)
    (draft / POLICY).mkdir(parents=True)
    _copy_description(model_dir, draft / POLICY, state.dtype)
    write(draft)
    _write_json(draft / "trainer_state.json", asdict(state))
    _write_json(draft / MANIFEST, {"step": state.step, "files": [_entry(draft, path) for path in _files(draft)]})
    draft.rename(final)
    _point_latest(root, final)
    return final


def resolve(path: Path) -> Path:
    """The folder of one checkpoint: `path` itself, or the newest complete one where `path` is their root.

    Raises WeightError for one that is missing, incomplete or damaged; it names the newest other one that is whole.
    """
    folder = path / LATEST if (path / LATEST).is_symlink() else path
    folder = folder.resolve()
    wrong = damage(folder)
    if wrong:
        others = [other for other in _newest_first(folder.parent) if other != folder and not damage(other)]
        offer = f"use {others[0]}, the newest that is whole" if others else "there is no other"
        raise WeightError(f"checkpoint {folder} cannot be used: {wrong}; {offer}")
    return folder


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, in words; empty where it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = {entry["path"]: entry for entry in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it has no readable {MANIFEST} ({error})"
    found = {_relative(folder, path) for path in _files(folder)} - {MANIFEST}
    if found != entries.keys():
        return f"files {sorted(found ^ entries.keys())} are missing or not listed in its {MANIFEST}"
    for name, entry in entries.items():
        if _entry(folder, folder / name) != entry:
            return f"{name} is not what its {MANIFEST} says"
    return ""


def num_bytes(folder: Path) -> int:
    """Size of everything in a checkpoint."""
    return sum(path.stat().st_size for path in _files(folder))


def export(checkpoint: Path, directory: Path) -> Path:
    """Copy a checkpoint's policy into `directory`, as Hugging Face expects a model; verified before and after.

    Raises WeightError for a damaged checkpoint or a directory that is not empty.
    """
    folder = resolve(checkpoint)
    if directory.exists() and any(directory.iterdir()):
        raise WeightError(f"{directory} is not empty: export into a new directory")
    shutil.copytree(folder / POLICY, directory, dirs_exist_ok=True)
    for source in _files(folder / POLICY):
        copy = directory / source.relative_to(folder / POLICY)
        if _hash(copy) != _hash(source):
            raise WeightError(f"{copy} differs from {source} after copying: the disk is full or failing")
    return directory


def _copy_description(model_dir: Path, policy: Path, dtype: str) -> None:
    """Configuration and tokenizer, but no weights; config.json with the type in which the weights are written."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(path, policy / path.name)
    config: dict[str, Any] = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    _write_json(policy / "config.json", {**config, "dtype": dtype})


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _newest_first(root: Path) -> list[Path]:
    steps = [path for path in root.glob(f"{_STEP}*") if path.name.removeprefix(_STEP).isdigit()]
    return sorted(steps, key=lambda path: -int(path.name.removeprefix(_STEP)))


def _relative(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    return {"path": _relative(folder, path), "num_bytes": path.stat().st_size, "xxh3_128": _hash(path)}


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _point_latest(root: Path, folder: Path) -> None:
    draft = root / f".{LATEST}.draft"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(root / LATEST)
