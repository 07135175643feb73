"""Any cut on the owner's side, any need on the engine's: what is staged is what a slice of the whole tensor is."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamline.protocol.errors import WeightError
from beamline.weights.choice import owner_of
from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.plan import Needs, make_plan
from beamline.weights.staging import Stage
from beamline.weights.tensors import ITEM_BYTES, STORAGE, Box, Shard
from beamline.weights.transport import Owner
from weight_shards import bits_of

type Policy = tuple[dict[str, np.ndarray], list[list[Shard]], Needs]

DTYPES = ["float32", "bfloat16", "uint8"]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Whole tensors, the shards of each of up to three owners, and the boxes that are needed."""
    num_owners = draw(st.integers(1, 3))
    wholes: dict[str, np.ndarray] = {}
    owned: list[list[Shard]] = [[] for _ in range(num_owners)]
    needs: dict[str, list[Box]] = {}
    for number in range(draw(st.integers(1, 4))):
        name, dtype = f"w{number}", draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        kind = STORAGE[ITEM_BYTES[dtype]]
        whole = (np.arange(int(np.prod(shape))) * 37 + number).astype(kind).reshape(shape)
        wholes[name] = whole
        for box in draw(boxes_of(shape)):
            values = whole[(..., *(slice(first, last) for first, last in box))]
            start = tuple(first for first, _ in box)
            shard = Shard(name=name, dtype=dtype, shape=shape, start=start, values=values)
            pieces = shard.cut(draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))) if shape else [shard]
            owned[draw(st.integers(0, num_owners - 1))] += pieces
        if draw(st.booleans()):
            needs[name] = draw(st.lists(inner_box(shape), min_size=1, max_size=2))
    return wholes, owned, needs


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid of boxes that makes up a tensor."""
    grid: list[Box] = [()]
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        spans = list(pairwise(edges)) or [(0, 0)]
        grid = [(*box, span) for box in grid for span in spans]
    return grid


@st.composite
def inner_box(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple((first, last) for first, last in spans)


@settings(max_examples=60, deadline=None)
@given(policies())
def test_what_is_staged_is_the_slice_of_the_whole(
    policy: tuple[dict[str, np.ndarray], list[list[Shard]], Needs],
) -> None:
    wholes, owned, needs = policy
    with owners(len(owned)) as exporters:
        for owner, shards in zip(exporters, owned, strict=True):
            owner.export(7, iter(shards))
        manifest = WeightManifest.decode(merge([owner.describe() for owner in exporters]).encode())
        stage = Stage(needs)
        staged = stage.fetch(manifest)
        read = bits_of(staged)
        assert list(read) == [entry.name for entry in manifest.tensors if entry.name in needs]
        for name, boxes in needs.items():
            for box in boxes:
                inside = tuple(slice(first, last) for first, last in box)
                np.testing.assert_array_equal(read[name][inside], wholes[name][inside], strict=True)
        assert staged.num_bytes == touched_bytes(manifest, needs)
        staged.fence()
        stage.close()


@contextmanager
def owners(number: int) -> Iterator[list[Owner]]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        made = [owner_of("shm", Path(directory), rank) for rank in range(number)]
        for owner in made:
            stack.callback(owner.close)
        yield made


def touched_bytes(manifest: WeightManifest, needs: Needs) -> int:
    """Of the pieces in which any needed element lies, found by marking elements one by one."""
    total = 0
    for entry in manifest.tensors:
        wanted = np.zeros(entry.shape, bool)
        for box in needs.get(entry.name, []):
            wanted[tuple(slice(first, last) for first, last in box)] = True
        for piece in entry.pieces:
            if wanted[tuple(slice(first, last) for first, last in piece.box)].any():
                total += int(np.prod(piece.shape)) * ITEM_BYTES[entry.dtype]
    return total


@pytest.mark.parametrize(
    ("start", "rows", "parts", "cuts"),
    [
        (0, 8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (3, 4, 4, [(3, 4), (4, 6), (6, 7)]),
        (4, 4, 2, [(4, 8)]),
        (0, 8, 1, [(0, 8)]),
        (0, 8, 3, [(0, 8)]),
        (4, 0, 4, [(4, 4)]),
    ],
)
def test_a_shard_is_cut_where_the_parts_of_its_tensor_begin(
    start: int, rows: int, parts: int, cuts: list[tuple[int, int]]
) -> None:
    whole = np.arange(16, dtype=np.float32).reshape(8, 2)
    values = whole[start : start + rows]
    shard = Shard(name="w", dtype="float32", shape=(8, 2), start=(start, 0), values=values, group="router")
    found = list(shard.cut(0, parts))
    assert [(piece.start[0], piece.start[0] + piece.values.shape[0]) for piece in found] == cuts
    assert {piece.group for piece in found} == {"router"}
    for piece, (first, last) in zip(found, cuts, strict=True):
        assert isinstance(piece.values, np.ndarray)
        np.testing.assert_array_equal(piece.values, whole[first:last])
        assert piece.values.base is not None, "a piece is a view"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float33"}, "dtype 'float33', expected one of"),
        ({"dtype": "bfloat16"}, "elements of 4 bytes are not bfloat16"),
        ({"start": (1, 0)}, r"a box of shape \[2, 2\] at \[1, 0\] does not lie in \[2, 2\]"),
        ({"start": (-1, 0), "shape": (4, 2)}, "does not lie in"),
        ({"shape": (2, 2, 2)}, "does not lie in"),
    ],
)
def test_an_impossible_shard_is_refused(changes: dict[str, object], text: str) -> None:
    fits = {"name": "w", "dtype": "float32", "shape": (2, 2), "start": (0, 0), "values": np.zeros((2, 2), np.float32)}
    with pytest.raises(WeightError, match=f"tensor w: .*{text}"):
        Shard(**{**fits, **changes})  # pyright: ignore[reportArgumentType]


def part(*shards: Shard, version: int = 1) -> WeightManifest:
    """What a rank describes that has exported them."""
    with owners(1) as (owner,):
        owner.export(version, shards)
        return owner.describe()


def rows(first: int, last: int, dtype: str = "float32", shape: tuple[int, ...] = (4,), group: str = "") -> Shard:
    values = np.zeros(last - first, STORAGE[ITEM_BYTES[dtype]])
    return Shard(name="w", dtype=dtype, shape=shape, start=(first,), values=values, group=group)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([part(rows(0, 2)), part(rows(2, 4), version=2)], "parts of policies 1 and 2 are no policy"),
        ([part(rows(0, 2)), part(rows(2, 4, "int32"))], "float32 .* on one rank, tensor w, int32"),
        ([part(rows(0, 2)), part(rows(2, 4, shape=(6,)))], r"\[4\] on one rank, .* \[6\] on another"),
        ([part(rows(0, 2)), part(rows(2, 4, group="router"))], r"on one rank, .* \(router\) on another"),
        ([part(rows(0, 2))], "the pieces of tensor w, .* do not make it up"),
        ([part(rows(0, 2)), part(rows(0, 2))], "do not make it up"),
        ([part(rows(0, 2)), part(rows(1, 3))], "do not make it up"),
        ([part(rows(0, 2)), part(rows(1, 4))], "do not make it up"),
    ],
)
def test_parts_that_are_no_policy_are_refused(parts: list[WeightManifest], text: str) -> None:
    with pytest.raises(WeightError, match=text):
        merge(parts)


def test_shards_of_one_rank_that_disagree_are_refused() -> None:
    with pytest.raises(WeightError, match=r"tensor w, float32 \[4\] in one shard, tensor w, int32 \[4\] in another"):
        part(rows(0, 2), rows(2, 4, "int32"))


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        ({"w": [((0, 4),)], "v": [((0, 4),)], "u": [((0, 4),)]}, "policy 1: tensor u is missing, one of 2"),
        ({"w": [((0, 4), (0, 1))]}, "2 dimensions are needed"),
        ({"w": [((0, 5),)]}, r"its pieces do not make up \[0:5\], which is needed"),
    ],
)
def test_a_policy_that_lacks_what_is_needed_is_refused(needs: Needs, text: str) -> None:
    with pytest.raises(WeightError, match=text):
        make_plan(merge([part(rows(0, 4))]), needs)


def test_a_plan_is_made_once_for_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    from beamline.weights import staging

    made: list[WeightManifest] = []
    monkeypatch.setattr(staging, "make_plan", lambda *args: made.append(args[0]) or make_plan(*args))
    stage = Stage()
    with owners(1) as (owner,):
        for version in range(3):
            owner.export(version, [rows(0, 4)])
            stage.fetch(merge([owner.describe()])).fence()
        assert len(made) == 1
    with owners(1) as (owner,):
        owner.export(3, [rows(0, 2), rows(2, 4)])
        stage.fetch(merge([owner.describe()])).fence()
        assert len(made) == 2
    stage.close()


def test_neighbours_are_fetched_in_one_go_and_gaps_are_not() -> None:
    shards = [Shard.whole(f"w{n}", "uint8", np.zeros(256, np.uint8)) for n in range(4)]
    manifest = merge([part(*shards)])
    whole: list[Box] = [((0, 256),)]
    assert make_plan(manifest, {"w0": whole, "w1": whole, "w3": whole}).ranges == [[(0, 512), (768, 256)]]
