"""Writing checkpoints: a draft is filled, sealed with its manifest, and takes its name.

`runtime.checkpoints` reads them.

Whatever is in the draft is on disk before its manifest is, and that before the folder has its name; the link `latest`
moves after that. A crash in between leaves a draft, which the next save or start removes.
"""

import os
import shutil
from pathlib import Path

import msgspec

from beamline.runtime.checkpoint_manifest import MANIFEST, Advance, manifest_of
from beamline.runtime.checkpoints import (
    DRAFT_SUFFIX,
    LATEST,
    POLICY,
    STEP_PREFIX,
    TRAINER_STATE,
    TrainerState,
    draft_of,
    step_folder,
)

_OLD = ".old"
"""Ends the name of a folder that is being replaced, before the draft's own ending."""


def begin(root: Path, step: int, folder: str = POLICY) -> Path:
    """A draft for the checkpoint of a step, with an empty folder in it; what an earlier try has left there is gone."""
    draft = draft_of(step_folder(root, step))
    discard(draft)
    (draft / folder).mkdir(parents=True)
    return draft


def seal(draft: Path, state: TrainerState, advance: Advance = lambda _: None) -> Path:
    """Finish a draft and give it its name, in the place of an older checkpoint of the step; returns its folder.

    Args:
        advance: told of the bytes that were read; what it raises stops the work.
    """
    (draft / TRAINER_STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    sync(draft, advance)
    (draft / MANIFEST).write_bytes(manifest_of(draft, state.step, advance=advance))
    sync_file(draft / MANIFEST)
    sync_file(draft)
    final = take_name(draft)
    _point_latest(final)
    return final


def take_name(draft: Path) -> Path:
    """Give a complete draft its name, for good; what has had it is gone then.

    A crash between the two renames leaves no folder of that name: `remove_drafts` gives the old one its name back.
    """
    final = draft.with_name(draft.name.removeprefix(".").removesuffix(DRAFT_SUFFIX))
    old = draft_of(final.with_name(final.name + _OLD))
    if final.exists():
        final.rename(old)
    draft.rename(final)
    sync_file(final.parent)
    discard(old)
    return final


def discard(folder: Path) -> None:
    """Remove a draft, or what is left of one."""
    if folder.exists():
        shutil.rmtree(folder)


def remove_drafts(root: Path) -> list[Path]:
    """Remove what crashes have left; returns what was there. For a time at which nothing is being saved.

    What was about to be replaced, and was not, has its name again.
    """
    for old in root.glob(f".{STEP_PREFIX}*{_OLD}{DRAFT_SUFFIX}"):
        final = old.with_name(old.name.removeprefix(".").removesuffix(_OLD + DRAFT_SUFFIX))
        if not final.exists():
            old.rename(final)
    drafts = sorted(root.glob(f".{STEP_PREFIX}*{DRAFT_SUFFIX}"))
    for draft in drafts:
        discard(draft)
    return drafts


def sync(folder: Path, advance: Advance = lambda _: None) -> None:
    """Have everything below a folder, and the folders themselves, written to disk."""
    for path in sorted(folder.rglob("*")):
        sync_file(path)
        advance(0)
    sync_file(folder)


def sync_file(path: Path) -> None:
    """A file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point_latest(folder: Path) -> None:
    root = folder.parent
    draft = root / f".{LATEST}{DRAFT_SUFFIX}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(root / LATEST)
    sync_file(root)
