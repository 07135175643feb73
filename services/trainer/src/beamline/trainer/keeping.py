"""A policy on its way to disk: a draft is filled while the policy stands still, and completed after it has gone on."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beamline.protocol.errors import BeamlineError, WeightError
from beamline.protocol.messages import SaveRequest
from beamline.runtime.checkpoint_manifest import MANIFEST, VERIFIED, read_manifest
from beamline.runtime.checkpoints import TRAINER_STATE, TrainerState, draft_of, step_folder
from beamline.runtime.export import link_or_copy, place_policy
from beamline.runtime.model_identity import ModelIdentity
from beamline.trainer.checkpoint import begin, discard, remove_drafts, seal, sync, take_name
from beamline.trainer.kept import Kept
from beamline.trainer.rank import Rank
from beamline.trainer.retention import Retention

log = logging.getLogger(__name__)

CHECKPOINT, EXPORT = "checkpoint", "export"
STATE_BYTES = 12
"""Of a parameter: main weight and two moments, float32."""
PACKAGES = ("beamline-trainer", "torch", "megatron-core", "megatron-bridge", "transformers")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_TAKEN = {MANIFEST, VERIFIED, TRAINER_STATE}


@dataclass(frozen=True, kw_only=True)
class KeepingSettings:
    """What of the run's configuration says what is kept, and where."""

    model_dir: Path
    dtype: str
    kept: Kept
    checkpoints: Path
    exports: Path
    retention: Retention
    layout: Mapping[str, int]
    optimizer: Mapping[str, Any]
    checkpoint_bytes: int
    """What a checkpoint takes on disk, about."""
    export_bytes: int
    """What an export takes, about."""


class Abandoned(BeamlineError):
    """The trainer ends and could not wait for the rest."""


class Keeping:
    """Checkpoints and exports of one trainer, which nobody else writes; one policy at a time.

    Raises OSError or BeamlineError where the disk fails. Then `discard` removes what is not complete.
    """

    def __init__(self, settings: KeepingSettings) -> None:
        self._settings = settings
        self._complete: set[int] = set()
        """Steps whose checkpoint this trainer has completed."""
        self.abandoned = threading.Event()
        """Set where nobody waits any longer: what is under way stops with Abandoned."""

    def clean_up(self) -> None:
        """Remove what an earlier process has left unfinished."""
        for root in (self._settings.checkpoints, self._settings.exports):
            for draft in remove_drafts(root):
                log.warning("%s was left unfinished by an earlier process, and is removed", draft)

    def copy(self, request: SaveRequest, rank: Rank) -> None:
        """Write down what changes with the policy's next update."""
        s, step = self._settings, request.step
        if request.checkpoint:
            self._fill(begin(s.checkpoints, step, s.kept.folder), rank.save)
        elif step not in self._complete:
            self._fill(begin(s.exports, step, s.kept.folder), rank.save_weights)

    def seal(self, step: int, files: Mapping[str, bytes]) -> tuple[Path, int]:
        """Complete a step's checkpoint with the coordinator's files; returns its folder and bytes."""
        s = self._settings
        draft = draft_of(step_folder(s.checkpoints, step))
        for name, content in files.items():
            (draft / _plain(name)).write_bytes(content)
        state = TrainerState(
            step=step,
            dtype=s.dtype,
            model=ModelIdentity.of(s.model_dir),
            layout=dict(s.layout),
            optimizer=dict(s.optimizer),
            versions={package: version(package) for package in PACKAGES},
            created=time.time(),
            **s.kept.facts(),
        )
        folder = seal(draft, state, self._advance)
        self._complete.add(step)
        self._prune()
        return folder, read_manifest(folder).num_bytes

    def export(self, step: int) -> Path:
        """Complete a step's export: from its draft, or else from the step's checkpoint. Returns the model's folder."""
        s, kept = self._settings, self._settings.kept
        draft = draft_of(step_folder(s.exports, step))
        if not draft.exists():
            place_policy(step_folder(s.checkpoints, step) / kept.folder, draft / kept.folder, link_or_copy)
        kept.complete(draft, self._advance)
        sync(draft, self._advance)
        return take_name(draft) / kept.model_folder

    def discard(self, step: int) -> None:
        """Remove what there is of a step that is not complete, as far as the disk lets us."""
        with suppress(OSError):
            for root in (self._settings.checkpoints, self._settings.exports):
                discard(draft_of(step_folder(root, step)))

    def explain(self, step: int, what: str, failure: Exception) -> str:
        """Why a step's checkpoint or export has come to nothing, with the bytes that it takes and that are there."""
        s = self._settings
        root, needed = (s.checkpoints, s.checkpoint_bytes) if what == CHECKPOINT else (s.exports, s.export_bytes)
        return (
            f"the {what} of step {step} in {root} came to nothing: {failure}; it takes about {needed:,} bytes, and "
            f"{_free_bytes(root):,} are free there"
        )

    def _fill(self, draft: Path, write: Callable[[Path], None]) -> None:
        kept = self._settings.kept
        kept.describe(draft / kept.folder)
        write(draft)

    def _prune(self) -> None:
        """The new checkpoint is whole whatever becomes of the old ones."""
        s = self._settings
        try:
            removed = s.retention.apply(s.checkpoints)
        except OSError as error:
            log.warning("old checkpoints in %s stay, which should go: %s", s.checkpoints, error)
            return
        if removed:
            log.info("removed the checkpoints of steps %s in %s", ", ".join(map(str, removed)), s.checkpoints)

    def _advance(self, _: int) -> None:
        if self.abandoned.is_set():
            raise Abandoned("the trainer had to end before it was written")


def _plain(name: str) -> str:
    """Raises WeightError for a name that would leave the folder or take the place of a file of the trainer's."""
    if not _PLAIN_NAME.fullmatch(name) or name in _TAKEN:
        raise WeightError(f"the coordinator's file {name!r} cannot be in a checkpoint: use a plain name of its own")
    return name


def _free_bytes(path: Path) -> int:
    """Of the filesystem that a folder is on or would be made on."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free
