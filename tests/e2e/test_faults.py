"""Services killed in a real run, and a training that diverges: nothing is lost, trained twice or left behind."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.coordinator.observe.log_lines import read_lines
from beamline.protocol.messages import Heartbeat, Message, Metrics
from real_runs import LiveRun, Run, processes_of, run_to_end, shared_memory_of


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    # Far more steps than it will come to: it is asked to end when all has happened, however long that takes.
    settings = ("trainer.num_steps=500", "trainer.eval_interval=0", "rollout.sampling.groups_per_step=16")
    run = LiveRun("tiny-beam", tmp_path, *settings)
    yield run
    run.kill_launcher()


def kill(heartbeat: Message) -> None:
    assert isinstance(heartbeat, Heartbeat)
    os.kill(heartbeat.pid, signal.SIGKILL)


async def step_after(live: LiveRun, step: int) -> int:
    """The next step that ends: its metrics are its last word."""
    metrics = await live.until(
        lambda m: isinstance(m, Metrics) and m.service == "coordinator" and m.step > step, f"the step after {step}"
    )
    assert isinstance(metrics, Metrics)
    return metrics.step


def trained_groups(run: Run) -> list[str]:
    """Group ids in the order in which the trainer says that it trained them."""
    log = (run.path / "logs" / "trainer.log").read_bytes().split(b"\n")
    said = (re.fullmatch(r"step \d+ trains (.*)", record.message) for record in read_lines("trainer", log))
    return [group for found in said if found for group in found[1].split()]


async def test_services_killed_at_any_moment_cost_nothing(live: LiveRun):
    await live.started()
    # In mid-group: the worker holds groups that it has not answered.
    kill(await live.until(lambda m: isinstance(m, Heartbeat) and m.service == "rollout" and m.in_flight > 0, "groups"))
    step = await step_after(live, 1)
    kill(await live.until(lambda m: isinstance(m, Heartbeat) and m.service == "reward", "the reward service"))
    step = await step_after(live, step)
    kill(await live.until(lambda m: isinstance(m, Heartbeat) and m.service == "coordinator", "the coordinator"))
    step = await step_after(live, step)
    live.interrupt()
    run = await live.end()
    assert run.code == 0, run.output
    last = max(run.steps)
    assert last >= step and sorted(run.steps) == list(range(1, last + 1))
    groups, ledger = trained_groups(run), run.summary["ledger"]
    assert len(groups) == len(set(groups)) == ledger["trained"]
    assert ledger["issued"] == sum(ledger[end] for end in ("trained", "filtered", "stale", "failed"))
    assert ledger["in_flight"] == 0
    for worker in ("rollout-0", "reward", "coordinator"):
        assert len(re.findall(rf"{worker} .*again", run.output)) >= 1, run.output
    assert processes_of(run.path) == [] and shared_memory_of(run.path) == []


def test_a_training_that_diverges_stops_with_the_number_and_the_mend(tmp_path: Path):
    run = run_to_end(
        "tiny-beam",
        tmp_path,
        "trainer.num_steps=3",
        "trainer.eval_interval=0",
        "rollout.sampling.groups_per_step=4",
        "trainer.optimizer.lr=1e38",
        "trainer.optimizer.warmup_steps=0",
    )
    assert run.code == 1, run.output
    told, _, end = run.output.partition("beamline: trainer ended with exit code 1")
    assert re.search(r"^trainer failed: .*\n  Traceback \(most recent call last\):$", told, re.MULTILINE) and end
    assert re.search(r"step [12].*(NaN|nan|inf)", run.output), run.output
    assert "trainer.optimizer.lr" in run.output
    assert processes_of(run.path) == [] and shared_memory_of(run.path) == []
