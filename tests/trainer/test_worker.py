"""The trainer's handlers on a table policy: versions, redelivery, leases, blobs."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from beamline.protocol import messages as m
from beamline.protocol.errors import BeamlineError, BlobError, ProtocolError, WeightError
from beamline.trainer.assemble import assemble
from beamline.trainer.fake_policy import FakePolicy
from trainer_bench import VOCAB, Bench, exported, lease


@pytest.fixture
def bench(tmp_path: Path):
    with ThreadPoolExecutor(1) as thread:
        bench = Bench(tmp_path, thread)
        yield bench
        bench.rank.close()


async def test_policy_zero_is_the_model_as_loaded(bench: Bench):
    await bench.worker.publish_first()
    (update,) = bench.sent
    assert isinstance(update, m.PolicyUpdate)
    assert (update.step, update.policy_version, bench.status.policy_version) == (0, 0, 0)
    assert torch.equal(await exported(bench, update), FakePolicy(VOCAB).table_VV.float())
    assert update.canary.logprobs == bench.policy.score(update.canary.tokens)


async def test_a_batch_becomes_the_next_policy_and_its_repeat_the_same_answer(bench: Bench):
    await bench.worker.publish_first()
    batch = await bench.batch(1)
    update = await bench.worker.handle(batch)
    assert (update.step, update.policy_version, bench.policy.num_updates) == (1, 1, 2)
    assert update.stats["tokens/loss"] == 21
    assert update.stats["policy/lr"] == 0.5
    assert torch.equal(await exported(bench, update), bench.policy.table_VV.detach().float())
    assert update.canary.logprobs == bench.policy.score(update.canary.tokens)
    assert await bench.worker.handle(batch) == update
    assert bench.policy.num_updates == 2
    told = [message for message in bench.sent if isinstance(message, m.Metrics)]
    assert told == [m.Metrics(service="trainer", worker="trainer-0", step=1, values=update.stats)]


async def test_a_step_that_skips_one_is_refused(bench: Bench):
    await bench.worker.publish_first()
    with pytest.raises(BeamlineError, match="batch of step 3 on top of policy 0"):
        await bench.train(3)
    assert bench.policy.num_updates == 0


async def test_trajectories_arrive_as_the_blob_has_them(bench: Bench):
    message = await bench.batch(1)
    batch = await assemble(message, bench.blobs)
    first = batch.mini_batches[0].trajectories
    assert [len(t.tokens) for t in first] == [4 + 7, 4 + 5]
    assert [t.advantage for t in first] == [-1.0, 1.0]
    assert all(t.num_prompt_tokens == 4 for t in first)
    rng = np.random.default_rng(0)
    prompt, tokens = rng.integers(0, VOCAB, 4), rng.integers(0, VOCAB, 12)
    assert first[1].tokens.tolist() == [*prompt, *tokens[:5]]
    assert first[0].tokens.tolist() == [*prompt, *tokens[5:]]
    assert first[1].rollout_logprobs.tolist() == pytest.approx(rng.normal(-2, 0.1, 12)[:5].tolist(), abs=1e-6)


async def test_blobs_that_are_gone_and_places_that_are_not_there_are_named(bench: Bench):
    message = await bench.batch(1)
    beyond = m.MiniBatch(ranks=[[m.Place(group=0, sample=9)]])
    with pytest.raises(ProtocolError, match="group 0, sample 9 has no advantage"):
        await assemble(m.TrainBatch(step=1, groups=message.groups, mini_batches=[beyond]), bench.blobs)
    with pytest.raises(ProtocolError, match="no share for rank 1"):
        await assemble(message, bench.blobs, rank=1)
    await bench.blobs.release("g1")
    batch = await assemble(message, bench.blobs)
    assert list(batch.failed_groups) == ["g1"] and "g1" in batch.failed_groups["g1"]
    assert [len(mini_batch.trajectories) for mini_batch in batch.mini_batches] == [2]
    await bench.blobs.release("g0")
    with pytest.raises(BlobError, match="none of its groups can be trained"):
        await assemble(message, bench.blobs)


async def test_a_phase_of_rollout_is_answered_by_measured_memory(bench: Bench):
    await bench.worker.publish_first()
    report = await lease(bench)
    assert (report.service, report.worker, report.incarnation, report.sequence) == ("trainer", "trainer-0", "abc", 5)
    assert report.freed_bytes >= 0
    assert 0 < report.resident_bytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    await bench.worker.on_phase(m.Phase(sequence=6, step=1, phase=m.PhaseName.TRAIN, policy_version=0, granted=True))
    assert bench.sent[-1] is report


async def test_a_lease_tells_of_gradients_that_are_still_there(bench: Bench):
    await bench.worker.publish_first()
    await bench.train(1)
    assert (await lease(bench)).kept_bytes == 0
    bench.policy.table_VV.grad = torch.zeros_like(bench.policy.table_VV)  # as if the update had not let go of it
    assert (await lease(bench)).kept_bytes == VOCAB * VOCAB * 8


async def test_where_there_is_no_shared_memory_the_step_fails_and_the_policy_before_can_be_read(bench: Bench):
    await bench.worker.publish_first()
    (update,) = bench.sent
    assert isinstance(update, m.PolicyUpdate)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # the system refuses memory to be mapped too
    try:
        with pytest.raises(WeightError, match=r"rank 0 of the trainer cannot export its weights: .*shared memory"):
            await bench.train(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(await exported(bench, update), FakePolicy(VOCAB).table_VV.float())
