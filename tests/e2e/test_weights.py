"""Policies on their way to two replicas in a whole run, one of which hangs."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.protocol.messages import Heartbeat, Message, Metrics, Phase, PhaseName
from real_runs import LiveRun, processes_of, shared_memory_of

NUM_STEPS = 5
REPLICAS = ("rollout-0", "rollout-1")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    settings = ("trainer.eval_interval=0", "rollout.sampling.groups_per_step=8", "algorithm.drop_zero_variance=false")
    replicas = ("rollout.replicas=2", "rollout.engine.threads=1", "weights.deadline_s=3", "weights.attempts=1")
    run = LiveRun("tiny-beam", tmp_path, f"trainer.num_steps={NUM_STEPS}", *settings, *replicas)
    yield run
    run.kill_launcher()


def is_training(message: Message) -> bool:
    """Of the second step or a later one: memory is released, and the next thing that a worker has to do is a policy."""
    return isinstance(message, Phase) and message.phase is PhaseName.TRAIN and message.granted and message.step > 1


async def test_a_worker_that_hangs_is_left_out_and_comes_back(live: LiveRun):
    await live.started()
    hanging = await live.until(lambda m: isinstance(m, Heartbeat) and m.worker == "rollout-1", "the second replica")
    assert isinstance(hanging, Heartbeat)
    await live.until(is_training, "a train step")
    os.kill(hanging.pid, signal.SIGSTOP)
    try:
        await live.until(lambda m: isinstance(m, Metrics) and m.values.get("sync/left_out", 0) == 1, "it is left out")
    finally:
        os.kill(hanging.pid, signal.SIGCONT)
    run = await live.end()
    assert run.code == 0, run.output
    assert sorted(run.steps) == list(range(1, NUM_STEPS + 1))
    left_out = [step for step, values in run.steps.items() if values["sync/left_out"]]
    assert left_out and "rollout-1" in run.output
    last = run.steps[NUM_STEPS]
    assert last["sync/left_out"] == 0
    for worker in REPLICAS:
        assert last[f"sync/canary_gap/{worker}"] <= 1e-4
    assert all(values["policy/mismatch_abs_mean"] <= 1e-5 for values in run.steps.values())
    ledger = run.summary["ledger"]
    assert ledger["issued"] == sum(ledger[end] for end in ("trained", "filtered", "stale", "failed"))
    assert processes_of(run.path) == [] and shared_memory_of(run.path) == []
