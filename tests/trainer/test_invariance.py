"""A step does not depend on how its work is cut: into micro-batches, over ranks, in which order.

Whole steps, from the message to the updated table, for every loss, reduction and term, in float64.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.algorithms.advantages import ADVANTAGES
from beamline.algorithms.kl import ESTIMATORS, KLPenalty
from beamline.algorithms.losses import LOSSES, Clip, PolicyLoss
from beamline.algorithms.off_policy import GeometricMask, OffPolicy, TokenImportance
from beamline.algorithms.reductions import REDUCTIONS
from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, cumulative, encode_blob, pack_float32, pack_int32
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.trainer.assemble import Reading
from beamline.trainer.penalty import RewardPenalty
from beamline.trainer.rank import Rank, StepSettings
from trainer_peers import NO_OUTLET, DataParallelPolicy, Meeting, ThreadPeers, on_ranks

VOCAB, LR, LONGEST = 7, 2.0, 24
SAME = ("policy/num_micro_batches", "packing/", "timing/")
"""Metrics that may differ, by how they begin: they tell how the work was cut."""


@dataclass(frozen=True)
class Cut:
    """How a step's work is dealt out."""

    num_ranks: int
    max_tokens: int
    seed: int
    """Of the order, and of who gets what."""


WHOLE = Cut(num_ranks=1, max_tokens=10_000, seed=0)

LOSS = st.sampled_from(sorted(LOSSES))
CUT = st.builds(
    Cut, num_ranks=st.sampled_from([1, 2, 4]), max_tokens=st.integers(LONGEST + 8, 200), seed=st.integers(0, 99)
)


async def groups(blobs: MemoryBlobStore, seed: int) -> list[m.TrainGroup]:
    """Four groups of one to four trajectories, some of their tokens no loss tokens; the blob of one group is gone."""
    rng, found = np.random.default_rng(seed), []
    for name in ("g0", "g1", "gone", "g2"):
        lengths = rng.integers(1, LONGEST + 1, rng.integers(1, 5)).tolist()
        blob = Trajectories(
            group_id=name,
            prompt_tokens=pack_int32(rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()),
            cu_seqlens=cumulative(lengths),
            tokens=pack_int32(rng.integers(0, VOCAB, sum(lengths)).tolist()),
            loss_mask=memoryview((rng.random(sum(lengths)) > 0.2).astype(np.uint8).tobytes()),
            rollout_logprobs=pack_float32(rng.normal(-2.0, 0.5, sum(lengths)).tolist()),
            finish_reasons=[m.FinishReason.STOP] * len(lengths),
            version_spans=[[VersionSpan(0, 0, length)] for length in lengths],
            texts=[""] * len(lengths),
        )
        ref = await blobs.put(name, "trajectories", encode_blob(blob))
        rewards = rng.normal(size=len(lengths)).tolist()
        found.append(
            m.TrainGroup(group_id=name, data_source="sums", trajectories=ref, advantages=rewards, rewards=rewards)
        )
    await blobs.release("gone")
    return found


def message(train_groups: list[m.TrainGroup], cut: Cut) -> m.TrainBatch:
    """Two mini-batches of two groups, shuffled and dealt out at random: a rank may get nothing."""
    rng, minis = np.random.default_rng(cut.seed), []
    for half in ((0, 1), (2, 3)):
        places = [m.Place(group=g, sample=s) for g in half for s in range(len(train_groups[g].advantages))]
        ranks: list[list[m.Place]] = [[] for _ in range(cut.num_ranks)]
        for place in rng.permutation(len(places)) if cut is not WHOLE else range(len(places)):
            ranks[rng.integers(cut.num_ranks)].append(places[place])
        minis.append(m.MiniBatch(ranks=ranks))
    return m.TrainBatch(step=1, groups=train_groups, mini_batches=minis)


def step(seed: int, cut: Cut, how: StepSettings) -> tuple[torch.Tensor, dict[str, float]]:
    """The table after a step, the same on all ranks, and the step's metrics."""
    blobs = MemoryBlobStore()
    batch = message(asyncio.run(groups(blobs, seed)), cut)

    def work(peers: ThreadPeers, meeting: Meeting) -> tuple[torch.Tensor, dict[str, float]]:
        policy = DataParallelPolicy(VOCAB, peers, meeting)
        policy.reference_VV = policy.reference_VV.roll(1)  # of a run that has gone on for a while
        rank = Rank(policy, peers, how, NO_OUTLET)
        metrics = rank.train(batch, asyncio.run(rank.share(batch, blobs)), LR)
        return policy.table_VV.detach(), metrics

    found = on_ranks(cut.num_ranks, partial(work))
    for table_VV, _ in found[1:]:
        assert torch.equal(table_VV, found[0][0])
    return found[0]


def check(seed: int, cut: Cut, loss: PolicyLoss, reduction: str, penalty: RewardPenalty | None = None) -> None:
    reading = Reading(reduction=REDUCTIONS[reduction], max_response_tokens=LONGEST, rewards=penalty is not None)
    (whole, expected), (parts, metrics) = (
        step(seed, one, StepSettings(loss=loss, max_tokens=one.max_tokens, reading=reading, penalty=penalty))
        for one in (WHOLE, cut)
    )
    # Where advantages are made again they are rounded to float32 once more.
    tolerance = 1e-10 if penalty is None else 1e-5
    torch.testing.assert_close(parts, whole, rtol=tolerance, atol=tolerance)
    for name in (name for name in expected if not name.startswith(SAME)):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    cut=CUT,
    loss=LOSS,
    reduction=st.sampled_from(sorted(REDUCTIONS)),
    dual=st.sampled_from([None, 1.5]),
    off_policy=st.sampled_from([OffPolicy(), OffPolicy(importance=TokenImportance(), sequence_mask=GeometricMask())]),
    kl=st.none() | st.builds(KLPenalty, st.floats(0.01, 1.0), st.sampled_from(list(ESTIMATORS.values()))),
    entropy=st.sampled_from([0.0, 0.1]),
)
def test_a_step_is_the_same_however_it_is_cut(
    seed: int,
    cut: Cut,
    loss: str,
    reduction: str,
    dual: float | None,
    off_policy: OffPolicy,
    kl: KLPenalty | None,
    entropy: float,
):
    check(seed, cut, PolicyLoss(Clip(0.2, 0.28, dual), off_policy, LOSSES[loss], kl, entropy), reduction)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    cut=CUT,
    loss=LOSS,
    estimator=st.sampled_from(sorted(ESTIMATORS)),
    advantage=st.sampled_from(sorted(ADVANTAGES)),
)
def test_a_divergence_in_the_reward_is_the_same_however_a_step_is_cut(
    seed: int, cut: Cut, loss: str, estimator: str, advantage: str
):
    penalty = RewardPenalty(KLPenalty(0.3, ESTIMATORS[estimator]), ADVANTAGES[advantage], advantage)
    check(seed, cut, PolicyLoss(surrogate=LOSSES[loss]), "token_mean", penalty)
