"""A trainer that is killed or asked to end while it saves, on a real nats-server with Megatron."""

import asyncio
import signal
from pathlib import Path

import killed_in_save
from beamline.protocol.config import OptimizerSection, TrainerSection
from beamline.runtime import checkpoints
from trainer_ring import START_S, STEP_S, Ring, open_ring

PROGRAM = killed_in_save.__file__


async def struck_while_saving(ring: Ring, root: Path, name: str) -> int:
    """The exit code of a trainer that gets a signal between files and manifest."""
    trainer = TrainerSection(threads=1, checkpoint_path=str(root), optimizer=OptimizerSection(lr=1e-3))
    process = await ring.start(trainer, program=(PROGRAM, name))
    await ring.update(START_S)
    await ring.bus.publish(await ring.batch(1))
    await ring.update()
    await ring.ask(1, export=True)
    await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode is not None
    return process.returncode


async def test_a_kill_leaves_a_draft_and_the_next_trainer_cleans_up_and_ends_in_order(tmp_path: Path):
    root = tmp_path / "ckpt"
    async with open_ring(tmp_path / "killed") as ring:
        assert await struck_while_saving(ring, root, "SIGKILL") == -signal.SIGKILL
    draft = root / ".global_step_1.draft"
    assert (draft / "policy" / "config.json").is_file() and any((draft / "optimizer").iterdir())
    assert [path.name for path in root.iterdir()] == [draft.name], "nothing has the name of a checkpoint"
    (facts,) = checkpoints.checkpoints_of(root)
    assert facts.wrong == "incomplete: it is being written or removed, or was left by a crash"
    (root / ".global_step_7.draft").mkdir()

    async with open_ring(tmp_path / "drained") as ring:
        assert await struck_while_saving(ring, root, "SIGTERM") == 0, "it ends after the checkpoint under way"
        saved = await ring.saved()
    assert (saved.path, saved.error) == (str(root / "global_step_1"), "")
    assert checkpoints.damage(root / "global_step_1") == ""
    assert sorted(path.name for path in root.iterdir()) == ["global_step_1", "latest"]
    exported = Path(saved.export_path) / "model.safetensors"
    assert exported.samefile(root / "global_step_1" / "policy" / "model.safetensors")
