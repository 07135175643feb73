"""What arrives of a train batch's blobs beside the tokens: where they come from, and which policy sampled them."""

import msgspec
import numpy as np
import pytest

from beamline.algorithms.reductions import REDUCTIONS
from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, cumulative, encode_blob, pack_float32, pack_int32
from beamline.protocol.errors import BlobError, ProtocolError
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.trainer.assemble import Reading, assemble
from beamline.trainer.batch import MicroBatch

type Spans = list[tuple[int, int, int]]


async def group(
    blobs: MemoryBlobStore, name: str, source: str, loss_mask: list[int], spans: list[Spans], lengths: list[int]
) -> m.TrainGroup:
    blob = Trajectories(
        group_id=name,
        prompt_tokens=pack_int32([1, 2]),
        cu_seqlens=cumulative(lengths),
        tokens=pack_int32(list(range(sum(lengths)))),
        loss_mask=memoryview(bytes(loss_mask)),
        rollout_logprobs=pack_float32([-1.0] * sum(lengths)),
        finish_reasons=[m.FinishReason.STOP] * len(lengths),
        version_spans=[[VersionSpan(*span) for span in own] for own in spans],
        texts=[""] * len(lengths),
    )
    ref = await blobs.put(name, "trajectories", encode_blob(blob))
    return m.TrainGroup(group_id=name, data_source=source, trajectories=ref, advantages=[1.0] * len(lengths))


def step_of(groups: list[m.TrainGroup], num_samples: int) -> m.TrainBatch:
    places = [m.Place(group=g, sample=s) for g in range(len(groups)) for s in range(num_samples)]
    return m.TrainBatch(step=5, groups=groups, mini_batches=[m.MiniBatch(ranks=[places])])


async def test_every_loss_token_knows_its_policy_and_every_trajectory_its_source():
    """Sample 0 was sampled from policies 3 and 4; a token that is no loss token needs none."""
    blobs = MemoryBlobStore()
    groups = [
        await group(blobs, "a", "words", [1, 1, 0, 1, 1, 1], [[(3, 0, 2), (4, 3, 4)], [(4, 0, 2)]], [4, 2]),
        await group(blobs, "b", "sums", [1, 1, 1], [[(2, 0, 1)], [(4, 0, 2)]], [1, 2]),
    ]
    batch = await assemble(step_of(groups, 2), blobs)
    assert batch.data_sources == ("sums", "words")
    packed = MicroBatch.pack(batch.mini_batches[0].trajectories)
    assert packed.policy_versions_L.tolist() == [3, 3, 4, 4, 4, 2, 4, 4]
    assert packed.sequences_L.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert [batch.data_sources[source] for source in packed.data_sources] == ["words", "words", "sums", "sums"]


@pytest.mark.parametrize("spans", [[(4, 0, 1)], [(4, 1, 3)], []])
async def test_spans_that_leave_out_a_trained_token_name_it(spans: Spans):
    blobs = MemoryBlobStore()
    covered = np.zeros(3, bool)
    for _, start, end in spans:
        covered[start:end] = True
    bad = await group(blobs, "bad", "sums", [1] * 4, [[(4, 0, 1)], spans], [1, 3])
    with pytest.raises(BlobError, match=f"group bad, sample 1: .* response token {int(np.argmin(covered))}; its spans"):
        await assemble(step_of([bad], 2), blobs)
    good = await group(blobs, "good", "sums", [1] * 4, [[(4, 0, 1)], [(4, 0, 3)]], [1, 3])
    batch = await assemble(step_of([bad, good], 2), blobs)
    assert list(batch.failed_groups) == ["bad"]
    assert len(batch.mini_batches[0].trajectories) == 2


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        # Loss tokens: a has 3 and 2, b has 1 and 4, c has none; the fourth group's blob is gone.
        ("token_mean", [1 / 10] * 4 + [0, 0]),
        ("sequence_mean", [1 / (4 * 3), 1 / (4 * 2), 1 / 4, 1 / (4 * 4), 0, 0]),
        ("seq_mean_token_sum_norm", [1 / (4 * 50)] * 4 + [0, 0]),
        ("prompt_mean", [1 / (2 * 5)] * 4 + [0, 0]),
    ],
)
async def test_weights_are_of_the_whole_mini_batch_without_what_failed(reduction: str, expected: list[float]):
    """Dealt to three ranks, of which one has what cannot be read alone."""
    blobs = MemoryBlobStore()
    spans: list[Spans] = [[(4, 0, 9)], [(4, 0, 9)]]
    groups = [
        await group(blobs, "a", "sums", [1, 1, 1, 0, 1, 1], spans, [3, 3]),
        await group(blobs, "b", "sums", [1, 0, 1, 1, 1, 1], spans, [2, 4]),
        await group(blobs, "c", "sums", [0, 0, 0], spans, [1, 2]),
        await group(blobs, "gone", "sums", [1, 1], spans, [1, 1]),
    ]
    await blobs.release("gone")
    places = [m.Place(group=g, sample=s) for g in range(4) for s in range(2)]
    ranks = [places[:3], places[3:6], places[6:]]
    message = m.TrainBatch(step=5, groups=groups, mini_batches=[m.MiniBatch(ranks=ranks)])
    how = Reading(reduction=REDUCTIONS[reduction], max_response_tokens=50)
    shares = [await assemble(message, blobs, rank, how) for rank in range(3)]
    found = [t for share in shares for t in share.mini_batches[0].trajectories]
    assert [t.weight for t in found] == pytest.approx(expected, rel=1e-12)
    assert [t.place for t in found] == [(p.group, p.sample) for p in places[:6]]


async def test_a_batch_without_a_loss_token_is_refused():
    blobs = MemoryBlobStore()
    silent = await group(blobs, "silent", "sums", [0, 0, 0], [[(4, 0, 1)], [(4, 0, 2)]], [1, 2])
    with pytest.raises(BlobError, match="step 5: none of its groups can be trained"):
        await assemble(step_of([silent], 2), blobs)


async def test_rewards_are_needed_where_advantages_are_made_again():
    blobs = MemoryBlobStore()
    spans: list[Spans] = [[(4, 0, 1)], [(4, 0, 2)]]
    good, gone = [await group(blobs, name, "sums", [1, 1, 1], spans, [1, 2]) for name in ("good", "gone")]
    await blobs.release("gone")
    groups = [msgspec.structs.replace(one, rewards=[1.0, -1.0]) for one in (good, gone)]
    batch = await assemble(step_of(groups, 2), blobs, how=Reading(rewards=True))
    assert [(one.group_id, one.rewards) for one in batch.groups] == [("good", (1.0, -1.0)), ("gone", (None, None))]
    short = [groups[0], msgspec.structs.replace(gone, rewards=[1.0])]
    with pytest.raises(ProtocolError, match="step 5: group gone, sample 1 has an advantage and no reward"):
        await assemble(step_of(short, 2), blobs, how=Reading(rewards=True))
