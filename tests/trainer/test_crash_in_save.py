"""A trainer that dies while it saves, on a real nats-server with Megatron: what is left, and who cleans it up."""

import asyncio
import signal
from pathlib import Path

import killed_in_save
from beamline.protocol.config import OptimizerSection, TrainerSection
from beamline.runtime import checkpoints
from trainer_ring import START_S, STEP_S, open_ring

TRAINER = TrainerSection(threads=1, optimizer=OptimizerSection(lr=1e-3))


async def test_a_kill_between_files_and_manifest_leaves_a_draft_that_the_next_trainer_removes(tmp_path: Path):
    async with open_ring(tmp_path) as ring:
        root = ring.run_dir / "checkpoints"
        dying = await ring.start(TRAINER, program=(killed_in_save.__file__,))
        await ring.update(START_S)
        await ring.bus.publish(await ring.batch(1))
        await ring.update()
        await ring.ask(1)
        _, log = await asyncio.wait_for(dying.communicate(), STEP_S)
        assert dying.returncode == -signal.SIGKILL, log.decode()

        draft = root / ".global_step_1.draft"
        assert (draft / "policy" / "config.json").is_file() and any((draft / "optimizer").iterdir())
        assert [path.name for path in root.iterdir()] == [draft.name], "nothing has the name of a checkpoint"
        assert checkpoints.newest(root) is None
        (facts,) = checkpoints.checkpoints_of(root)
        assert facts.wrong == "incomplete: it is being written or removed, or was left by a crash"

    async with open_ring(tmp_path / "again") as ring:
        trainer = TrainerSection(threads=1, checkpoint_path=str(root), optimizer=OptimizerSection(lr=1e-3))
        process = await ring.start(trainer)
        await ring.update(START_S)
        assert list(root.iterdir()) == []
        await ring.bus.publish(await ring.batch(1))
        await ring.update()
        folder = await ring.checkpoint(1)
        assert (folder, checkpoints.damage(folder)) == (root / "global_step_1", "")
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), STEP_S)
        assert process.returncode == 0, log.decode()
