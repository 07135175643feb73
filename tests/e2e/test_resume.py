"""A run that was killed while it saved, lost a checkpoint and then its trainer, beside one that was never stopped.

The first keeps its optimizer's state on a disk, the second on the device; every number is compared all the same.
"""

import asyncio
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from beamline.coordinator.launch.process_table import read_processes
from beamline.coordinator.samples import KeptGroup, read_samples, samples_path
from beamline.runtime.checkpoints import damage, step_folder
from real_runs import LiveRun, Run, beamline, ending, of_step, processes_of, run_to_end, shared_memory_of

NUM_STEPS, INTERVAL = 12, 2
KILLED_IN_SAVE_OF, TRAINER_KILLED_AFTER = 6, 7
SAVE_DEADLINE_S = 60.0
SETTINGS = (
    f"trainer.num_steps={NUM_STEPS}",
    f"trainer.checkpoint_interval={INTERVAL}",
    "trainer.keep_checkpoints=0",
    "trainer.eval_interval=0",
    "trainer.optimizer.warmup_steps=0",
    "rollout.sampling.groups_per_step=2",
    "rollout.sampling.samples_per_group=4",
    "rollout.sampling.max_response_tokens=32",
    "algorithm.drop_zero_variance=false",
    # One sequence at a time: what is computed for it then depends on nothing that runs beside it (docs/resume.md).
    "rollout.engine.max_num_seqs=1",
    "rollout.engine.prefix_caching=false",
)
BY_THE_CLOCK = ("timing/", "resources/", "sync/", "checkpoint/", "engine/", "grading/", "throughput/")
"""Metrics that two runs of the same steps do not share; all others are equal."""


@dataclass(frozen=True)
class Resumed:
    """The run that was stopped, at its end."""

    run: Run
    draft_was_left: bool
    damaged: Path
    """The checkpoint that was the newest when the run was killed, and had a byte changed after that."""
    used: Path
    """The one before."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_to_end("tiny-beam", tmp_path_factory.mktemp("whole"), *SETTINGS, name="whole")
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    return asyncio.run(stopped_and_resumed(tmp_path_factory.mktemp("resumed")))


async def stopped_and_resumed(folder: Path) -> Resumed:
    """The same command twice, as whoever started it would repeat it."""
    state = f"trainer.optimizer={{state: disk, state_dir: {folder / 'nvme'}}}"
    command = ("tiny-beam", folder, *SETTINGS, state, "trainer.resume_mode=latest")
    checkpoints = folder / "resumed" / "checkpoints"
    with ending(LiveRun(*command, name="resumed")) as live:
        await live.started()
        await live.until(of_step(KILLED_IN_SAVE_OF - 1), "the step before the save")
        draft = checkpoints / f".global_step_{KILLED_IN_SAVE_OF}.draft"
        await asyncio.to_thread(kill_at, draft, live)
    draft_was_left = draft.exists()
    newest = KILLED_IN_SAVE_OF if step_folder(checkpoints, KILLED_IN_SAVE_OF).exists() else KILLED_IN_SAVE_OF - INTERVAL
    change_a_bit(step_folder(checkpoints, newest))
    with ending(LiveRun(*command, name="resumed")) as live:
        await live.said("nats-server is ready")
        await live.until(of_step(TRAINER_KILLED_AFTER), "the step after which the trainer is killed")
        os.killpg(read_processes(live.path)["trainer"], signal.SIGKILL)
        run = await live.end()
    used = step_folder(checkpoints, newest - INTERVAL)
    return Resumed(run, draft_was_left, damaged=step_folder(checkpoints, newest), used=used)


def kill_at(draft: Path, live: LiveRun) -> None:
    """SIGKILL to the launcher and to the trainer, as soon as the trainer saves."""
    until = time.monotonic() + SAVE_DEADLINE_S
    while not draft.exists():
        assert time.monotonic() < until, f"{draft} did not come within {SAVE_DEADLINE_S:g} s: {live.output()}"
    live.kill()
    os.killpg(read_processes(live.path)["trainer"], signal.SIGKILL)


def change_a_bit(checkpoint: Path) -> None:
    """One bit of the optimizer's state."""
    with (checkpoint / "optimizer" / "rank-00000.state").open("r+b") as file:
        file.seek(1000)
        (byte,) = file.read(1)
        file.seek(1000)
        file.write(bytes([byte ^ 1]))


def groups_of(run: Run, step: int) -> list[KeptGroup]:
    return read_samples(samples_path(run.path / "samples", step))


def test_every_step_has_the_same_prompts_and_completions(whole: Run, resumed: Resumed):
    for step in range(1, NUM_STEPS + 1):
        expected = groups_of(whole, step)
        assert expected and groups_of(resumed.run, step) == expected, step


def test_every_step_has_the_same_losses_and_rewards(whole: Run, resumed: Resumed):
    assert sorted(resumed.run.steps) == sorted(whole.steps) == list(range(1, NUM_STEPS + 1))
    assert sum(values["policy/grad_norm"] > 0 for values in whole.steps.values()) >= 3, "there is something to be equal"
    for step, values in whole.steps.items():
        expected = {name: value for name, value in values.items() if not name.startswith(BY_THE_CLOCK)}
        assert {"reward/mean", "policy/loss", "policy/grad_norm", "data/position"} <= expected.keys()
        found = resumed.run.steps[step]
        assert {name: found.get(name) for name in expected} == expected, step


def test_the_weights_are_the_same_to_the_bit(whole: Run, resumed: Resumed):
    """Of every checkpoint: those before the kill, the one that was made again, and the last."""
    for step in range(INTERVAL, NUM_STEPS + 1, INTERVAL):
        folders = [step_folder(run.path / "checkpoints", step) for run in (whole, resumed.run)]
        first, second = ((folder / "policy" / "model.safetensors").read_bytes() for folder in folders)
        assert first == second, step
        assert not damage(folders[1]), "a step that is taken again replaces the damaged checkpoint"


def test_the_ledger_closes_over_all_starts(whole: Run, resumed: Resumed):
    assert resumed.run.code == 0, resumed.run.output
    assert resumed.run.summary["status"] == "finished"
    assert resumed.run.summary["ledger"] == whole.summary["ledger"]
    assert processes_of(resumed.run.path) == [] and shared_memory_of(resumed.run.path) == []


def test_each_start_says_where_it_goes_on(resumed: Resumed):
    output, checkpoints = resumed.run.output, resumed.run.path / "checkpoints"
    assert f"checkpoint {resumed.damaged} is passed over: damaged: bucket 0 of rank-00000.state" in output
    step = resumed.used.name.removeprefix("global_step_")
    assert f"going on after step {step}, from {resumed.used}" in output
    if resumed.draft_was_left:
        draft = checkpoints / f".global_step_{KILLED_IN_SAVE_OF}.draft"
        assert f"checkpoint {draft} is passed over: incomplete" in output and not draft.exists()
    newest = step_folder(checkpoints, TRAINER_KILLED_AFTER // INTERVAL * INTERVAL)
    assert f"trainer was killed by SIGKILL; the run goes on after step {newest.name[12:]}, from {newest}" in output


def test_a_damaged_checkpoint_is_not_started_from_and_another_offered(whole: Run, tmp_path: Path):
    shutil.copytree(whole.path / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    named = step_folder(tmp_path / "checkpoints", 8)
    change_a_bit(named)
    ended = beamline(
        *("run", "tiny-beam", f"run.dir={tmp_path}", "run.name=next", *SETTINGS),
        *("trainer.resume_mode=from_path", f"trainer.resume_path={named}"),
    )
    assert ended.code == 2 and "Traceback" not in ended.output, ended.output
    assert f"checkpoint {named} cannot be used: damaged: bucket 0 of rank-00000.state" in ended.output
    assert f"use {step_folder(tmp_path / 'checkpoints', 12)}, the newest that is whole" in ended.output
    assert not (tmp_path / "next").exists()
