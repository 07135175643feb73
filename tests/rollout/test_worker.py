"""The worker against an engine without a model: gates, versions, canaries, leases."""

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, decode_blob
from beamline.protocol.errors import Rejected, Retryable
from beamline.rollout.fake_engine import CACHE_BYTES, WEIGHT_BYTES, FakeEngine, token_logprob
from rollout_bench import CANARY_TOKENS, Bench, Turns
from rollout_messages import export, phase, policy_update, prompt_group


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
    assert (loaded.policy_version, loaded.canary_gap, loaded.error) == (0, 0.0, "")
    assert await bench.is_open()
    assert bench.status.policy_version == 0 and bench.status.state is m.WorkerState.READY


async def test_a_group_that_asks_for_a_newer_policy_is_left_for_later(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(3)
    with pytest.raises(Retryable, match="policy 4"):
        await bench.worker.handle(prompt_group([4], seeds=[1], min_policy_version=4))


async def test_damaged_weights_leave_the_old_policy_served(folder: Path):
    bench = Bench(FakeEngine(damaged={1}), folder)
    await bench.update(0)
    refused = await bench.update(1)
    assert refused.policy_version == 1 and "damaged" in refused.error
    assert bench.status.policy_version == 0 and bench.engine.policy_version == 0
    assert not await bench.is_open()
    assert (await bench.update(2)).error == ""
    assert await bench.is_open() and bench.status.policy_version == 2


async def test_a_manifest_that_is_gone_is_reported_like_damaged_weights(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    ref = await bench.blobs.put("policy", "weight_manifest", b"later")
    await bench.blobs.release("policy")
    await bench.worker.on_policy(policy_update(1, ref, m.Canary(tokens=[1], logprobs=[])))
    answer = bench.said.pop()
    assert isinstance(answer, m.PolicyLoaded) and ref.key in answer.error
    assert bench.status.policy_version == 0 and not await bench.is_open()


async def test_a_policy_whose_canary_disagrees_is_refused_and_the_old_one_is_put_back(folder: Path):
    bench = Bench(FakeEngine(drifted={1}), folder)
    await bench.update(0)
    refused = await bench.update(1)
    assert refused.canary_gap == pytest.approx(0.5)
    assert "policy 1 is refused" in refused.error and "policy 0 is served on" in refused.error
    assert (bench.status.policy_version, bench.engine.policy_version) == (0, 0) and not await bench.is_open()
    answer = await bench.worker.handle(prompt_group([4], seeds=[1]))
    assert isinstance(answer, m.TrajectoryGroup) and answer.max_policy_version == 0
    with pytest.raises(Retryable, match="policy 1"):
        await bench.worker.handle(prompt_group([4], seeds=[1], min_policy_version=1))
    assert (await bench.update(2)).error == "" and bench.status.policy_version == 2


@pytest.mark.parametrize("exact", [True, False])
async def test_one_token_sent_to_other_experts_is_forgiven_in_a_lower_precision_alone(folder: Path, exact: bool):
    bench = Bench(FakeEngine(), folder, exact=exact)
    ref = await bench.blobs.put("policy", "weight_manifest", export(folder, 0, {"weight": np.zeros(4)}).encode())
    logprobs = [token_logprob(token, 0) for token in CANARY_TOKENS[1:]]
    logprobs[1] -= 2.0
    await bench.worker.on_policy(policy_update(0, ref, m.Canary(tokens=CANARY_TOKENS, logprobs=logprobs)))
    loaded = bench.said.pop()
    assert isinstance(loaded, m.PolicyLoaded)
    assert bool(loaded.error) is exact


async def test_nothing_is_served_where_the_old_weights_cannot_be_put_back(folder: Path):
    first = Bench(FakeEngine(drifted={0}), folder)
    assert "no policy is served before it" in (await first.update(0)).error
    assert first.status.policy_version == -1 and not await first.is_open()
    bench = Bench(FakeEngine(drifted={1}), folder)
    await bench.update(0)
    bench.engine.damaged = {0}
    assert "policy 0 cannot be put back, so that none is served" in (await bench.update(1)).error
    assert bench.status.policy_version == -1 and not await bench.is_open()
    assert "refused" in bench.status.waiting_for
    assert (await bench.update(2)).error == "" and await bench.is_open()


async def test_a_group_that_sampled_from_a_refused_policy_fails_and_may_be_tried_again(folder: Path):
    turns = Turns()
    bench = Bench(FakeEngine(drifted={1}, wait=turns.wait), folder)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3], max_tokens=64)))
    (await turns.next()).set_result(None)
    token = await turns.next()
    bench.engine.policy_version = 1  # one token while the refused policy is loaded
    token.set_result(None)
    token = await turns.next()
    await bench.update(1)
    token.set_result(None)
    answer = await turns.finish(sampling)
    assert isinstance(answer, m.GroupFailed) and (answer.kind, answer.retryable) == ("policy", True)


async def test_a_group_under_way_beside_a_refused_policy_is_kept_if_none_of_its_tokens_came_from_it(folder: Path):
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench = Bench(FakeEngine(drifted={1}, wait=lambda: turn), folder)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[1])))
    await asyncio.sleep(0)
    await bench.update(1)
    turn.set_result(None)
    answer = await sampling
    assert isinstance(answer, m.TrajectoryGroup) and answer.max_policy_version == 0


async def test_a_repeated_update_is_answered_without_loading_twice(folder: Path):
    bench = Bench(FakeEngine(), folder)
    ref = await bench.blobs.put("policy", "weight_manifest", export(folder, 1, {"w": np.ones(2)}).encode())
    update = policy_update(1, ref, m.Canary(tokens=[1, 5], logprobs=[token_logprob(5, 1)]))
    await bench.worker.on_policy(update)
    await bench.blobs.release("policy")
    await bench.worker.on_policy(update)
    assert [message.error for message in bench.said if isinstance(message, m.PolicyLoaded)] == ["", ""]
    assert await bench.is_open()


async def test_a_group_spans_the_policies_that_sampled_it(folder: Path):
    turns = Turns()
    bench = Bench(FakeEngine(wait=turns.wait), folder)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3], max_tokens=64)))
    (await turns.next()).set_result(None)
    second = await turns.next()
    await bench.update(1)
    second.set_result(None)
    answer = await turns.finish(sampling)
    assert isinstance(answer, m.TrajectoryGroup)
    assert (answer.min_policy_version, answer.max_policy_version) == (0, 1)
    blob = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    assert blob.version_spans == [[VersionSpan(0, 0, 1), VersionSpan(1, 1, answer.response_lengths[0])]]


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
    assert not await bench.is_open() and bench.status.state is m.WorkerState.PAUSED
    await bench.worker.on_phase(phase(m.PhaseName.TRAIN, sequence=8, granted=True))
    assert not bench.said, "what was released when it was asked for is not reported again"
    assert (await bench.update(1)).error == "", "a policy is loaded while memory is released"
    assert not await bench.is_open()
    await bench.worker.on_phase(phase(m.PhaseName.GENERATE, sequence=9, granted=False))
    assert not await bench.is_open(), "another holds the devices until the phase is granted"
    await bench.worker.on_phase(phase(m.PhaseName.GENERATE, sequence=10, granted=True))
    assert await bench.is_open() and not bench.said


async def test_a_worker_with_devices_of_its_own_releases_nothing(folder: Path):
    bench = Bench(FakeEngine(), folder, colocated=False)
    await bench.update(0)
    await bench.worker.on_phase(phase(m.PhaseName.TRAIN, sequence=1, granted=True))
    assert await bench.is_open() and not bench.said
