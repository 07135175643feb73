"""Which checkpoints stay, and that what goes, goes at once or not at all."""

import os
import shutil
from pathlib import Path

import pytest

from beamline.runtime.checkpoint_manifest import MANIFEST
from beamline.runtime.checkpoints import checkpoints_of, damage
from beamline.trainer import retention
from beamline.trainer.checkpoint import remove_drafts, take_name
from beamline.trainer.retention import Retention
from made_checkpoints import make_checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in range(1, 9):
        make_checkpoint(tmp_path / "ckpt", step, created=float(step))
    return tmp_path / "ckpt"


def steps(root: Path) -> list[int]:
    return sorted(facts.step for facts in checkpoints_of(root) if not facts.wrong)


@pytest.mark.parametrize(
    ("num_newest", "every", "kept"),
    [(0, 0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, 0, [8]), (3, 0, [6, 7, 8]), (2, 3, [3, 6, 7, 8]), (20, 0, [*range(1, 9)])],
)
def test_the_newest_stay_and_every_so_many_steps_one(root: Path, num_newest: int, every: int, kept: list[int]):
    removed = Retention(num_newest=num_newest, every=every).apply(root)
    assert (steps(root), removed) == (kept, [step for step in range(1, 9) if step not in kept])
    assert (root / "latest").resolve() == root / "global_step_8"
    assert sorted(path.name for path in root.iterdir()) == [*(f"global_step_{step}" for step in kept), "latest"]


def test_what_a_run_went_on_from_stays_until_a_newer_one_is_complete(root: Path):
    """Those of later steps were made before, by a life of the run that is over: they count as older."""
    for step in (5, 6, 7, 8):
        shutil.rmtree(root / f"global_step_{step}")
    keep_one = Retention(num_newest=1, every=0)
    (make_checkpoint(root, 5, created=5.0) / MANIFEST).unlink()
    keep_one.apply(root)
    assert steps(root) == [4], "the newer one is not complete"
    make_checkpoint(root, 5, created=6.0)
    assert keep_one.apply(root) == [4]
    assert steps(root) == [5]


def test_damaged_ones_neither_count_nor_go(root: Path):
    (root / "global_step_8" / "ledger.json").unlink()
    (root / "global_step_2" / MANIFEST).unlink()
    assert Retention(num_newest=2, every=0).apply(root) == [1, 3, 4, 5]
    assert steps(root) == [6, 7] and (root / "global_step_8").is_dir() and (root / "global_step_2").is_dir()


def test_a_crash_while_removing_leaves_no_half_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch):
    class Crash(BaseException):
        pass

    def crash(folder: Path) -> None:
        if folder.exists():
            os.unlink(folder / "ledger.json")
            raise Crash

    monkeypatch.setattr(retention, "discard", crash)
    with pytest.raises(Crash):
        Retention(num_newest=7, every=0).apply(root)
    assert [damage(root / f"global_step_{step}") for step in range(2, 9)] == [""] * 7
    assert not (root / "global_step_1").exists()
    assert remove_drafts(root) == [root / ".global_step_1.draft"]
    assert steps(root) == [*range(2, 9)]


def test_a_crash_between_two_renames_gives_the_old_checkpoint_its_name_back(root: Path):
    """Of a step that is saved anew: the old folder has another name by then, and the new one has none yet."""

    class Crash(BaseException):
        pass

    class Unnameable(type(root)):
        def rename(self, target: Path) -> Path:
            if self.name.endswith(".draft"):
                raise Crash
            return super().rename(target)

    old = root / "global_step_8"
    draft = Unnameable(shutil.copytree(old, root / ".global_step_8.draft"))
    with pytest.raises(Crash):
        take_name(draft)
    assert steps(root) == [*range(1, 8)]
    assert remove_drafts(root) == [root / ".global_step_8.draft"]
    assert damage(old) == "" and steps(root) == [*range(1, 9)]
