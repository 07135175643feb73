"""Traces at the trainer's door: bad ones are named, their group fails, and the rest of the batch is trained."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from beamline.models.routing import RoutingShape
from beamline.protocol import messages as m
from beamline.protocol.blobs import (
    RoutedExperts,
    Trajectories,
    VersionSpan,
    cumulative,
    encode_blob,
    pack_float32,
    pack_int32,
)
from beamline.protocol.errors import BlobError
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.trainer.assemble import Reading, assemble
from beamline.trainer.batch import MicroBatch
from beamline.trainer.routing import RouteCounts, traces

SHAPE = RoutingShape(num_layers=3, top_k=2, num_experts=8, sparse_layers=(1, 2))
LENGTHS = [7, 5]
"""Tokens of each trajectory, of which three are the prompt's."""
NUM_ROWS = [length - 1 for length in LENGTHS]
RESPONSES = [length - 3 for length in LENGTHS]


def ids(seed: int = 0, dtype: str = "u1") -> np.ndarray:
    """[R, 3, 2]: two different experts a token, a dense first layer."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 8, (sum(LENGTHS) - 2, 3))
    both = np.stack((first, (first + rng.integers(1, 8, first.shape)) % 8), -1)
    both[:, 0] = 0
    return both.astype(dtype)


def blob(ids_RLK: np.ndarray, lengths: list[int] | None = None, group_id: str = "g0") -> RoutedExperts:
    _, num_layers, top_k = ids_RLK.shape
    return RoutedExperts(
        group_id=group_id,
        num_layers=num_layers,
        top_k=top_k,
        dtype="uint8" if ids_RLK.itemsize == 1 else "uint16",
        cu_seqlens=cumulative([length - 1 for length in lengths or LENGTHS]),
        ids=memoryview(ids_RLK.tobytes()),
    )


def changed(row: int, layer: int, experts: list[int]) -> np.ndarray:
    found = ids()
    found[row, layer] = experts
    return found


@pytest.mark.parametrize(("dtype", "num_experts"), [("u1", 8), ("u2", 300)])
def test_every_trajectory_gets_its_rows(dtype: str, num_experts: int):
    whole = ids(dtype=dtype)
    first, second = traces(blob(whole), "g0", NUM_ROWS, replace(SHAPE, num_experts=num_experts))
    assert np.array_equal(first, whole[:6])
    assert np.array_equal(second, whole[6:])
    assert first.itemsize == np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (blob(ids(), [6, 6]), "trajectory 0: expected 6 rows, found 5"),
        (blob(ids(), [7, 3, 3]), "expected 2 trajectories, found 3"),
        (blob(ids()[:, :2]), "trajectory 0: expected 3 layers of 2 experts a token as uint8, found 2 of 2"),
        (blob(ids()[..., :1]), "expected 3 layers of 2 experts a token as uint8, found 3 of 1"),
        (
            blob(changed(7, 2, [1, 8])),
            r"trajectory 1: expected 2 different experts below 8 in row 1, layer 2, found \[1, 8\]",
        ),
        (blob(changed(5, 1, [0, 0])), r"trajectory 0: expected .* in row 5, layer 1, found \[0, 0\]"),
        (blob(ids(), group_id="g9"), "of group g9, expected those of group g0"),
    ],
)
def test_what_does_not_fit_is_named(bad: RoutedExperts, words: str):
    with pytest.raises(BlobError, match=f"^routed experts .*{words}"):
        traces(bad, "g0", NUM_ROWS, SHAPE)


class Store:
    """Two groups of two trajectories in a blob store."""

    def __init__(self) -> None:
        self.blobs = MemoryBlobStore()

    async def batch(self, first_trace: bytes | None) -> m.TrainBatch:
        groups = [
            await self._group("g0", first_trace),
            await self._group("g1", encode_blob(blob(ids(1), group_id="g1"))),
        ]
        minis = [
            m.MiniBatch(ranks=[[m.Place(group=0, sample=0), m.Place(group=1, sample=0)], []]),
            m.MiniBatch(ranks=[[], [m.Place(group=0, sample=1), m.Place(group=1, sample=1)]]),
        ]
        return m.TrainBatch(step=3, groups=groups, mini_batches=minis)

    async def with_aborted(self, num_rows: list[int]) -> m.TrainBatch:
        """One group: its first trajectory ended, two were aborted, after two tokens and before the first."""
        routed = blob(np.resize(ids(), (sum(num_rows), 3, 2)), [rows + 1 for rows in num_rows])
        group = await self._group("g0", encode_blob(routed), [4, 2, 0], [1.0, None, None])
        mini = m.MiniBatch(ranks=[[m.Place(group=0, sample=0)]])
        return m.TrainBatch(step=3, groups=[group], mini_batches=[mini])

    async def _group(
        self,
        name: str,
        trace: bytes | None,
        responses: Sequence[int] = RESPONSES,
        advantages: Sequence[float | None] = (1.0, -1.0),
    ) -> m.TrainGroup:
        sampled = Trajectories(
            group_id=name,
            prompt_tokens=pack_int32([1, 2, 3]),
            cu_seqlens=cumulative(responses),
            tokens=pack_int32(list(range(sum(responses)))),
            loss_mask=memoryview(b"\x01" * sum(responses)),
            rollout_logprobs=pack_float32([-1.0] * sum(responses)),
            finish_reasons=[m.FinishReason.ABORT if one is None else m.FinishReason.STOP for one in advantages],
            version_spans=[[VersionSpan(2, 0, length)] if length else [] for length in responses],
            texts=[""] * len(responses),
        )
        routed = None if trace is None else await self.blobs.put(name, "routed_experts", trace)
        ref = await self.blobs.put(name, "trajectories", encode_blob(sampled))
        return m.TrainGroup(
            group_id=name, data_source="sums", trajectories=ref, routed_experts=routed, advantages=list(advantages)
        )


async def test_traces_reach_the_trajectories_and_pack_without_their_last_rows():
    store = Store()
    batch = await assemble(await store.batch(encode_blob(blob(ids()))), store.blobs, how=Reading(routing=SHAPE))
    first, second = batch.mini_batches[0].trajectories
    assert np.array_equal(first.routes, ids()[:6])
    assert np.array_equal(second.routes, ids(1)[:6])
    packed = MicroBatch.pack([first, replace(second, routes=None)])
    assert packed.routes_TLK.shape == (14, 3, 2)
    assert np.array_equal(packed.routes_TLK[:6], ids()[:6])
    assert packed.routed_T.tolist() == [True] * 6 + [False] * 8
    assert batch.failed_groups == {}


async def test_a_group_with_aborted_trajectories_is_trained_on_those_that_ended():
    store = Store()
    batch = await assemble(await store.with_aborted([6, 4, 0]), store.blobs, how=Reading(routing=SHAPE))
    (only,) = batch.mini_batches[0].trajectories
    assert np.array_equal(only.routes, ids()[:6])
    assert (len(only.tokens), only.num_loss_tokens, batch.failed_groups) == (7, 4, {})


async def test_rows_of_a_trajectory_that_was_aborted_before_its_first_token_are_somebody_elses():
    store = Store()
    with pytest.raises(BlobError, match="trajectory 2: expected 0 rows, found 2"):
        await assemble(await store.with_aborted([6, 4, 2]), store.blobs, how=Reading(routing=SHAPE))


async def test_a_run_without_replay_reads_no_traces():
    store = Store()
    batch = await assemble(await store.batch(b"no blob"), store.blobs)
    assert all(t.routes is None for t in batch.mini_batches[0].trajectories)
    assert batch.failed_groups == {}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda: encode_blob(blob(ids()))[:-5], "are not a RoutedExperts blob"),
        (lambda: encode_blob(blob(ids(), [6, 6])), "trajectory 0: expected 6 rows, found 5"),
        (
            lambda: encode_blob(blob(changed(0, 1, [200, 1]))),
            r"trajectory 0: expected .* in row 0, layer 1, found \[200, 1\]",
        ),
    ],
)
async def test_a_group_with_a_bad_trace_fails_and_the_rest_is_trained(spoil: Callable[[], bytes], words: str):
    """On all ranks alike: their weights must agree."""
    store = Store()
    message = await store.batch(spoil())
    shares = [await assemble(message, store.blobs, rank, Reading(routing=SHAPE)) for rank in range(2)]
    for share in shares:
        assert list(share.failed_groups) == ["g0"]
        assert re.search(words, share.failed_groups["g0"])
    weights = [[t.weight for mini in share.mini_batches for t in mini.trajectories] for share in shares]
    assert weights == [[1 / 4], [1 / 2]]
    assert [len(mini_batch.trajectories) for share in shares for mini_batch in share.mini_batches] == [1, 0, 0, 1]


async def test_a_batch_of_which_nothing_is_left_is_refused_by_name():
    store = Store()
    message = await store.batch(None)
    for group in message.groups:
        await store.blobs.release(group.group_id)
    with pytest.raises(BlobError, match=r"step 3: none of its groups can be trained: .*g0.*g1"):
        await assemble(message, store.blobs, how=Reading(routing=SHAPE))


def test_counts_become_shares():
    counts = RouteCounts(*np.array([[0, 10, 10], [0, 2, 2], [0, 8, 4]]))
    assert counts.metrics() == {
        "routing/fallback_share": 0.2,
        "routing/agreement": 0.75,
        "routing/agreement_layer_1": 1.0,
        "routing/agreement_layer_2": 0.5,
    }
    assert RouteCounts.none().metrics() == {}
