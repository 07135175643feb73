"""A run whose trainer was lost goes on by itself from its newest checkpoint, as long as that gets it further."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator.launch.comeback import Comeback
from beamline.coordinator.launch.run import run
from beamline.coordinator.launch.supervisor import RestartPolicy, RunFailed, TrainerLost
from beamline.protocol.config import RunConfig
from launcher_fakes import LineDisplay, alive, fake_command, noted_pids, shared_memory
from made_checkpoints import make_checkpoint

DEADLINE_S = 60


async def run_with(config: RunConfig, display: LineDisplay, **behaviours: str) -> Path:
    return await asyncio.wait_for(run(config, display, command=fake_command(**behaviours)), DEADLINE_S)


def run_dir(config: RunConfig) -> Path:
    return Path(config.run.dir) / "trial"


def assert_nothing_left(run_dir: Path) -> None:
    assert [pid for pid in noted_pids(run_dir) if alive(pid)] == []
    assert not shared_memory(run_dir).exists()


async def test_the_run_goes_on_each_time_that_there_is_a_newer_checkpoint(config: RunConfig) -> None:
    display = LineDisplay()
    path = await run_with(config, display, trainer="lost,4,7", coordinator="resumed,7", rollout_0="child")
    for step in (4, 7):
        saved = path / "checkpoints" / f"global_step_{step}"
        assert f"trainer was killed by SIGKILL; the run goes on after step {step}, from {saved}" in display.lines
    assert (path / "trainer.starts").read_text() == "xxx"
    assert "step  1/50  reward 0.500  2.0 s" in display.lines, "the last start came to its end"
    assert_nothing_left(path)


async def test_a_step_that_kills_the_trainer_again_ends_the_run(config: RunConfig) -> None:
    display = LineDisplay()
    with pytest.raises(RunFailed) as failure:
        await run_with(config, display, trainer="lost,4,4,4")
    path = run_dir(config)
    text = str(failure.value)
    assert text.startswith("trainer was killed by SIGKILL; the optimizer's state went with it, and it has gone on")
    assert "after step 4 before and come no further: mend what its log says first" in text
    assert str(path / "logs" / "trainer.log") in text
    assert (path / "trainer.starts").read_text() == "xx"
    saved = path / "checkpoints" / "global_step_4"
    assert display.lines[-1] == f"its newest checkpoint is {saved}: trainer.resume_mode=latest goes on from there"
    assert_nothing_left(path)


async def test_without_a_checkpoint_the_run_ends_and_says_how_to_begin(config: RunConfig) -> None:
    with pytest.raises(RunFailed, match=r"there is no checkpoint yet to go on from: begin anew with --overwrite"):
        await run_with(config, LineDisplay(), trainer="crash")
    none_kept = replace(config, trainer=replace(config.trainer, checkpoint_interval=0))
    with pytest.raises(RunFailed, match=r"trainer.checkpoint_interval=0 keeps no checkpoint: begin anew"):
        await asyncio.wait_for(
            run(none_kept, LineDisplay(), overwrite=True, command=fake_command(trainer="crash")), DEADLINE_S
        )


def test_restarts_have_a_limit_within_their_time(config: RunConfig, tmp_path: Path) -> None:
    """Though each has a newer checkpoint; those of long ago do not count."""
    now = 0.0
    policy = RestartPolicy(max_restarts=2, window_s=100.0)
    comeback = Comeback(policy, lambda: now, lambda line: None)
    lost = TrainerLost("trainer was killed by SIGKILL", "The end of its log", 137)
    config = replace(
        config, model=replace(config.model, path=str(tmp_path / "checkpoints" / "global_step_1" / "policy"))
    )

    def go_on(step: int) -> int:
        make_checkpoint(tmp_path / "checkpoints", step, created=float(step))
        return comeback.origin(lost, config, tmp_path).step

    assert [go_on(1), go_on(2)] == [1, 2]
    with pytest.raises(RunFailed, match="it has gone on 2 times within 100 s") as failure:
        go_on(3)
    assert failure.value.exit_code == 137
    now = 101.0
    assert go_on(4) == 4


async def test_all_steps_taken_is_no_reason_to_go_on(config: RunConfig) -> None:
    done = replace(config, trainer=replace(config.trainer, num_steps=4))
    with pytest.raises(RunFailed, match=r"has 4 steps behind it, and trainer.num_steps=4"):
        await run_with(done, LineDisplay(), trainer="lost,4")
