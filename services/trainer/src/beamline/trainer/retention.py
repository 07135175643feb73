"""Which checkpoints stay: the newest few, and every so many steps one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from beamline.runtime.checkpoints import CheckpointFacts, checkpoints_of, draft_of
from beamline.trainer.checkpoint import discard, sync_file


@dataclass(frozen=True, kw_only=True)
class Retention:
    """As `trainer.keep_checkpoints` and `trainer.keep_every` say."""

    num_newest: int
    """0 keeps all."""
    every: int
    """Of the older ones, those whose step is a multiple of it; 0 keeps none of them."""

    def to_remove(self, newest_first: Sequence[CheckpointFacts]) -> list[CheckpointFacts]:
        """What has had its time. The checkpoint that a run went on from is among them once newer ones are complete.

        Those that are not complete count for nothing and stay: whoever has damaged them may want to look at them.
        """
        if self.num_newest == 0:
            return []
        complete = [facts for facts in newest_first if not facts.wrong]
        older = complete[self.num_newest :]
        return [facts for facts in older if self.every == 0 or facts.step % self.every != 0]

    def apply(self, root: Path) -> list[int]:
        """Remove them, each by its name first, so that a crash leaves no part of one under it; returns their steps."""
        removed = self.to_remove(checkpoints_of(root))
        for facts in removed:
            folder = Path(facts.path)
            draft = draft_of(folder)
            discard(draft)
            folder.rename(draft)
            sync_file(root)
            discard(draft)
        return sorted(facts.step for facts in removed)
