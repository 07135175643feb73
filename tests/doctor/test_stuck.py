"""`beamline doctor stuck` about runs of real processes that somebody has hurt: the planted cause comes first.

Launcher, broker, coordinator and reward are the real ones; rollout and trainer have no engine. All runs start at once,
so that waits which have to last do so while others are looked at.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from engineless_run import EnginelessRun, can_mount

pytestmark = pytest.mark.asyncio(loop_scope="module")
COLOCATED = "run.placement=colocated"


@dataclass(frozen=True)
class Runs:
    """By what is wrong with them."""

    ring: EnginelessRun
    keeping: EnginelessRun
    hanging: EnginelessRun


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runs]:
    folder = tmp_path_factory.mktemp("stuck")
    started = Runs(
        ring=await EnginelessRun.start(folder, "ring", "rollout.replicas=2", "run.placement=disaggregated"),
        keeping=await EnginelessRun.start(
            folder, "keeping", "rollout=keep", COLOCATED, "coordinator.lease_deadline_s=50"
        ),
        hanging=await EnginelessRun.start(folder, "hanging", "rollout=hang", COLOCATED, "reward.grade_timeout_s=24"),
    )
    yield started
    await asyncio.gather(*(run.kill() for run in vars(started).values()))


def root_cause(text: str) -> str:
    """The first finding's sentence."""
    return next(line for line in text.splitlines() if line.startswith("1. "))


@pytest.mark.skipif(not can_mount(), reason="the kernel lets nobody here mount a small /dev/shm of their own")
async def test_a_full_blob_store(runs: Runs, tmp_path: Path) -> None:
    full = await EnginelessRun.start(tmp_path, "full", "trainer=hoard", small_store=True)
    try:
        await full.shown("rollout-0 ended with exit code 1; starting it again")
        text = await full.until_stuck()
    finally:
        await full.kill()
    assert root_cause(text).startswith("1. the store of blobs is full: 0.0 of 1.0 MiB are free in /dev/shm/beamline-")
    assert "rollout-0 could not write a blob of" in root_cause(text)
    assert "lower rollout.sampling.groups_per_step" in text
    assert "shared memory is full: blob g-" in text, "the last lines of its log"


async def test_a_run_that_moves(runs: Runs) -> None:
    await runs.ring.shown("step       2/")
    code, text = await runs.ring.doctor()
    assert code == 0, text
    assert text.startswith("run ring moves: step ") and ", phase " in text
    assert "has waited" in text


async def test_a_frozen_rollout_worker(runs: Runs) -> None:
    pid = runs.ring.pid("rollout-1")
    os.kill(pid, signal.SIGSTOP)
    code, text = await runs.ring.doctor()
    os.kill(pid, signal.SIGCONT)
    assert code == 1, text
    assert text.startswith("run ring is stuck: step ")
    assert "1. rollout-1 has not sent a heartbeat for " in root_cause(text)
    assert f"its process {pid} is stopped by a signal, as SIGSTOP does (state T): `kill -CONT {pid}`" in root_cause(
        text
    )
    assert "\n2. " not in text, "who waits for it is no cause"
    assert "coordinator has waited" in text


async def test_a_stopped_reward_service(runs: Runs) -> None:
    pid = runs.ring.pid("reward")
    os.kill(pid, signal.SIGSTOP)
    code, text = await runs.ring.doctor("--json")
    os.kill(pid, signal.SIGCONT)
    assert code == 1, text
    found = json.loads(text)
    assert [(finding["cause"], finding["about"]) for finding in found["findings"]] == [("stopped", "reward")]
    groups = [w for w in found["waits"] if w["worker"] == "coordinator" and "groups of step" in w["what"]]
    assert groups and "reward" in groups[0]["on"]


async def test_a_broker_that_is_stopped_or_gone(runs: Runs) -> None:
    broker, launcher = runs.ring.pid("nats-server"), runs.ring.pid("launcher")
    os.kill(broker, signal.SIGSTOP)
    code, text = await runs.ring.doctor()
    assert code == 1, text
    assert f"1. nats-server passes nothing on: its process {broker} is stopped by a signal" in root_cause(text)
    os.kill(launcher, signal.SIGSTOP)
    os.kill(broker, signal.SIGKILL)
    code, text = await runs.ring.doctor()
    assert code == 1, text
    assert f"1. nats-server, process {broker}, has ended; the launcher would start it again, but" in root_cause(text)
    assert f"`kill -CONT {launcher}`" in root_cause(text)
    os.kill(launcher, signal.SIGCONT)
    await runs.ring.shown("nats-server ended with exit code")
    await runs.ring.shown("step ")
    code, text = await runs.ring.doctor()
    assert code == 0, text


async def test_a_holder_that_does_not_release(runs: Runs) -> None:
    text = await runs.keeping.until_stuck()
    cause = root_cause(text)
    assert "coordinator has waited" in cause
    assert "for rollout-0 to release device memory before phase train; rollout-0 is paused" in cause
    assert f"`kill -USR1 {runs.keeping.pid('rollout-0')}`" in cause
    assert "trainer has waited" in text and "for a train batch, from coordinator" in text


async def test_a_grader_that_hangs(runs: Runs) -> None:
    text = await runs.hanging.until_stuck()
    assert "1. reward has waited" in root_cause(text)
    assert "of at most 24 s for grader planted_graders:by_text (process" in root_cause(text)
    assert re.search(r"coordinator has waited .* groups of step 1 \(.*g-00000\d in reward", text), text


async def test_a_folder_half_deleted(runs: Runs) -> None:
    run = runs.ring
    shutil.rmtree(run.path / "logs")
    (run.path / "processes.json").unlink()
    code, text = await run.doctor()
    assert code == 1, text
    assert "processes.json is gone from the run's folder" in text and "logs is gone" in text
    assert "coordinator has waited" in text, "what the bus tells is told all the same"
    shutil.rmtree(run.path / "credentials")
    code, text = await run.doctor()
    assert (code, "credentials/cli.json does not exist" in text) == (1, True), text
    (run.path / "config.json").unlink()
    code, text = await run.doctor()
    assert (code, "config.json does not exist" in text) == (2, True), text


async def test_a_run_that_is_not_there_or_has_ended(runs: Runs, tmp_path: Path) -> None:
    ended = EnginelessRun(tmp_path, "rung", runs.ring._process, ())
    ended.path.mkdir(parents=True)
    (ended.path / "launcher.lock").touch()
    assert await ended.doctor() == (
        2,
        "beamline: run rung has ended: `beamline status rung` shows what it came to\n",
    )
    ended.path.rename(ended.path.with_name("ring"))
    code, text = await ended.doctor()
    assert code == 2 and "no run is called 'rung'" in text and "the nearest is 'ring'" in text
