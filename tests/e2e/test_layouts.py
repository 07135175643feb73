"""Engine and trainer of two ranks each in a whole run: they agree, the checkpoint exports, a dead rank is named.

In the first run blobs travel over the bus and weights over NIXL, as between hosts; in the second adapters in files.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from beamline.protocol.messages import Heartbeat, Metrics
from real_runs import LiveRun, Run, beamline, processes_of, run_to_end, shared_memory_of

NUM_STEPS = 2


@pytest.fixture(
    scope="module",
    params=[
        ("tiny-beam", "rollout.engine.pipeline_parallel=2", "trainer.parallel.tensor=2", "bus.blob_store=jetstream"),
        (
            *("tiny-qwen3-moe", "rollout.engine.tensor_parallel=2", "trainer.parallel.pipeline=2"),
            *("weights.transport=checkpoint", "model.lora={rank: 8, normalize_moe_lora: true}"),
        ),
    ],
    ids=["beam-pp2-tp2", "qwen3-moe-lora-tp2-pp2"],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe, *layout = request.param
    run = run_to_end(
        recipe,
        tmp_path_factory.mktemp("layouts"),
        *layout,
        f"trainer.num_steps={NUM_STEPS}",
        "trainer.eval_interval=0",
        "rollout.sampling.groups_per_step=8",
        "algorithm.drop_zero_variance=false",
    )
    assert run.code == 0, run.output
    return run


def test_engine_and_trainer_agree_at_every_step(run: Run):
    assert sorted(run.steps) == list(range(1, NUM_STEPS + 1))
    for values in run.steps.values():
        assert values["policy/mismatch_abs_mean"] <= 1e-5
        assert values["sync/canary_gap/rollout-0"] <= 1e-4
        assert values["routing/fallback_share"] == 0
        assert values["routing/agreement"] >= 0.999
        assert values["policy/grad_norm"] > 0


def test_its_checkpoint_exports(run: Run, tmp_path: Path):
    checkpoint = Path(run.summary["artifacts"]["checkpoint"])
    assert len(list(checkpoint.resolve().rglob("rank-*.state"))) == 2
    merged = ("--merge",) if (checkpoint / "adapter").is_dir() else ()
    ended = beamline("export", str(checkpoint), str(tmp_path / "model"), *merged, deadline_s=120)
    assert ended.code == 0, ended.output
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_nothing_is_left_running(run: Run):
    assert processes_of(run.path) == [] and shared_memory_of(run.path) == []


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    # Far more steps than it will come to: the rank dies in mid-run, however late this test looks.
    settings = ("trainer.num_steps=500", "trainer.eval_interval=0", "rollout.sampling.groups_per_step=8")
    run = LiveRun("tiny-beam", tmp_path, "trainer.parallel.data=2", *settings)
    yield run
    run.kill_launcher()


async def test_a_rank_that_is_killed_ends_the_run_by_name(live: LiveRun):
    await live.started()
    await live.until(lambda m: isinstance(m, Metrics) and m.step >= 1, "the first step")
    trainer = await live.until(lambda m: isinstance(m, Heartbeat) and m.service == "trainer", "the trainer")
    assert isinstance(trainer, Heartbeat)
    (rank,) = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
    os.kill(int(rank), signal.SIGKILL)
    run = await live.end()
    assert run.code != 0
    assert re.search(rf"rank 1 of the trainer \(process {rank}\) was killed by SIGKILL", run.output), run.output
    assert processes_of(run.path) == [] and shared_memory_of(run.path) == []
