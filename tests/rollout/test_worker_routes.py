"""Routed experts on their way out of the worker: in a blob of their own, or refused by name."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.protocol.blobs import RoutedExperts, Trajectories, decode_blob
from beamline.protocol.errors import Rejected
from beamline.rollout.fake_engine import FakeEngine, routes
from rollout_bench import SHAPE, Bench
from rollout_messages import prompt_group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


async def test_the_routes_of_what_is_trained_on_travel_in_a_blob_of_their_own(folder: Path):
    bench = Bench(FakeEngine(shape=SHAPE), folder, shape=SHAPE)
    await bench.update(0)
    group = prompt_group([4, 5, 6], seeds=[1, 2])
    answer = await bench.worker.handle(group)
    assert isinstance(answer, m.TrajectoryGroup) and answer.routed_experts is not None
    trajectories = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    blob = decode_blob(RoutedExperts, await bench.blobs.get(answer.routed_experts))
    assert (blob.num_layers, blob.top_k, blob.dtype) == (3, 4, "uint8")
    ends = list(blob.cu_seqlens.cast("B").cast("i"))
    assert np.diff(ends).tolist() == [2 + length for length in answer.response_lengths]
    first = list(trajectories.tokens.cast("B").cast("i"))[: answer.response_lengths[0]]
    expected = routes([4, 5, 6, *first[:-1]], SHAPE)
    assert bytes(blob.ids[: expected.nbytes]) == expected.tobytes()
    evaluated = await bench.worker.handle(msgspec.structs.replace(group, purpose=m.Purpose.EVAL))
    assert isinstance(evaluated, m.TrajectoryGroup) and evaluated.routed_experts is None
    kept = await bench.worker.handle(msgspec.structs.replace(group, purpose=m.Purpose.EVAL, keep_routes=True))
    assert isinstance(kept, m.TrajectoryGroup) and kept.routed_experts is not None


def _without(ids_RLK: np.ndarray) -> np.ndarray:
    ids_RLK[1, 2] = 0
    return ids_RLK


def _out_of_range(ids_RLK: np.ndarray) -> np.ndarray:
    ids_RLK[1, 2, 3] = 16
    return ids_RLK


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda ids: ids[:-1], r"expected \d+ rows, found \d+"),
        (lambda ids: ids[:, :2], "expected 3 layers of 4 experts a token as uint8, found 2 of 4"),
        (lambda ids: ids[..., :3], "expected 3 layers of 4 experts a token as uint8, found 3 of 3"),
        (lambda ids: ids.astype(np.uint16), "found 3 of 4 as uint16"),
        (_out_of_range, r"expected 4 different experts below 16 in row 1, layer 2, found \[.*16\]"),
        (_without, r"below 16 in row 1, layer 2, found \[0, 0, 0, 0\]: nothing was written"),
        (None, "found none"),
    ],
    ids=["rows", "layers", "top_k", "dtype", "range", "a stage's rows", "no trace"],
)
async def test_a_trace_that_cannot_be_replayed_fails_its_group_by_name_and_the_worker_goes_on(
    folder: Path, spoil: Callable[[np.ndarray], np.ndarray] | None, words: str
):
    engine = FakeEngine(shape=SHAPE, spoil=spoil or (lambda _ids: None))
    bench = Bench(engine, folder, shape=SHAPE)
    await bench.update(0)
    group = prompt_group([4, 5, 6], seeds=[1, 2])
    with pytest.raises(Rejected, match=rf"group {group.group_id}, trajectory 0: .*{words}") as rejected:
        await bench.worker.handle(group)
    failed = bench.worker.on_rejected(group, rejected.value)
    assert (failed.kind, failed.retryable, failed.group_id) == ("routed_experts", False, group.group_id)
    assert engine.num_forgotten == 1, "what may lie in the cache with such rows must not be handed out again"
    engine.spoil = lambda ids: ids
    assert isinstance(await bench.worker.handle(group), m.TrajectoryGroup)
