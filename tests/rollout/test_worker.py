"""The worker against an engine without a model: groups, versions, leases."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, decode_blob
from beamline.protocol.errors import Rejected, Retryable
from beamline.rollout.fake_engine import CACHE_BYTES, WEIGHT_BYTES, FakeEngine, token_logprob
from rollout_bench import Bench
from rollout_messages import phase, prompt_group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


async def test_a_group_becomes_trajectories_with_seeds_versions_and_logprobs(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    group = prompt_group([4, 5, 6], seeds=[1, 2, 1])
    answer = await bench.worker.handle(group)
    assert isinstance(answer, m.TrajectoryGroup)
    blob = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    tokens, ends = list(blob.tokens.cast("B").cast("i")), list(blob.cu_seqlens.cast("B").cast("i"))
    rows = [tokens[a:b] for a, b in pairwise(ends)]
    assert rows[0] == rows[2] != rows[1]
    assert answer.response_lengths == [len(row) for row in rows]
    assert blob.texts == ["Answer: 1", "Answer: 2", "Answer: 1"]
    assert blob.version_spans[1] == [VersionSpan(0, 0, len(rows[1]))]
    assert list(blob.loss_mask) == [1] * len(tokens)
    expected = np.array([token_logprob(token, 0) for token in tokens], np.float32)
    assert np.array_equal(np.frombuffer(blob.rollout_logprobs, np.float32), expected)
    assert answer.task == group.task and answer.trajectories.owner == group.group_id
    assert (answer.min_policy_version, answer.max_policy_version) == (0, 0)
    assert answer.routed_experts is None


async def test_no_group_is_taken_before_the_first_policy(folder: Path):
    bench = Bench(FakeEngine(), folder)
    assert not await bench.is_open()
    assert bench.status.policy_version == -1 and "first policy" in bench.status.waiting_for
    with pytest.raises(Retryable):
        await bench.worker.handle(prompt_group([4], seeds=[1]))
    loaded = await bench.update(0)
    assert (loaded.policy_version, loaded.attempt, loaded.canary_gap, loaded.error) == (0, 1, 0.0, "")
    assert await bench.is_open()
    assert bench.status.policy_version == 0 and bench.status.state is m.WorkerState.READY


async def test_a_group_that_asks_for_a_newer_policy_is_left_for_later(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(3)
    with pytest.raises(Retryable, match="policy 4"):
        await bench.worker.handle(prompt_group([4], seeds=[1], min_policy_version=4))


async def test_a_prompt_that_does_not_fit_fails_for_good(folder: Path):
    bench = Bench(FakeEngine(max_model_tokens=10), folder)
    await bench.update(0)
    group = prompt_group([4] * 9, seeds=[1], max_tokens=8)
    with pytest.raises(Rejected) as rejected:
        await bench.worker.handle(group)
    failed = bench.worker.on_rejected(group, rejected.value)
    assert (failed.kind, failed.retryable) == ("prompt_too_long", False)
    assert "17" in failed.text and "10" in failed.text and group.group_id in failed.text


async def test_memory_is_released_in_the_phases_of_others_and_reported(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    await bench.worker.on_phase(phase(m.PhaseName.TRAIN, sequence=7, granted=False))
    report = bench.said.pop()
    assert isinstance(report, m.LeaseReport)
    assert (report.sequence, report.freed_bytes, report.resident_bytes) == (7, CACHE_BYTES, WEIGHT_BYTES)
    assert report.kept_bytes == 0
    assert not await bench.is_open() and bench.status.state is m.WorkerState.PAUSED
    await bench.worker.on_phase(phase(m.PhaseName.TRAIN, sequence=8, granted=True))
    assert not bench.said, "what was released when it was asked for is not reported again"
    assert (await bench.update(1)).error == "", "a policy is loaded while memory is released"
    assert not await bench.is_open()
    await bench.worker.on_phase(phase(m.PhaseName.GENERATE, sequence=9, granted=False))
    assert not await bench.is_open(), "another holds the devices until the phase is granted"
    await bench.worker.on_phase(phase(m.PhaseName.GENERATE, sequence=10, granted=True))
    assert await bench.is_open() and not bench.said


async def test_what_was_not_released_is_reported_as_it_was_measured(folder: Path):
    bench = Bench(FakeEngine(kept_bytes=4096), folder)
    await bench.worker.on_phase(phase(m.PhaseName.TRAIN, sequence=7, granted=False))
    (report,) = bench.said
    assert isinstance(report, m.LeaseReport)
    assert (report.kept_bytes, report.freed_bytes) == (4096, CACHE_BYTES - 4096)
    assert report.resident_bytes == WEIGHT_BYTES + 4096


async def test_a_worker_with_devices_of_its_own_releases_nothing(folder: Path):
    bench = Bench(FakeEngine(), folder, colocated=False)
    await bench.update(0)
    await bench.worker.on_phase(phase(m.PhaseName.TRAIN, sequence=1, granted=True))
    assert await bench.is_open() and not bench.said
