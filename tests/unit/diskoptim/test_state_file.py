"""One file format for every optimizer's state: any part of it by name, and every byte checked."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from beamline.diskoptim.errors import StateError
from beamline.diskoptim.layout import ALIGNMENT, bytes_needed
from beamline.diskoptim.state_file import AdamState, StateFile, write_state

SHAPES = {"scale": (), "odd": (333, 77), "empty": (0, 4), "cube": (5, 3, 7), "long": (50_001,)}


def states() -> Iterator[tuple[str, AdamState]]:
    generator = torch.Generator().manual_seed(1)
    for name, shape in SHAPES.items():
        yield name, AdamState(*(torch.randn(shape, generator=generator) for _ in range(3)))


def written(folder: Path) -> StateFile:
    write_state(folder, "rank-00000", states(), num_steps=12, bucket_bytes=100_000)
    return StateFile.open(folder, "rank-00000")


def assert_same(found: AdamState, expected: AdamState, rows: slice = slice(None)) -> None:
    for one, other in (
        (found.main, expected.main), (found.exp_avg, expected.exp_avg), (found.exp_avg_sq, expected.exp_avg_sq),
    ):  # fmt: skip
        assert torch.equal(one, other[rows] if other.dim() else other)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    paths = write_state(tmp_path, "rank-00000", states(), num_steps=12, bucket_bytes=100_000)
    assert [path.name for path in paths] == ["rank-00000.state", "rank-00000.json"]
    state = StateFile.open(tmp_path, "rank-00000")
    assert (state.num_steps, state.names()) == (12, list(SHAPES))
    for name, expected in states():
        assert state.shape(name) == SHAPES[name]
        assert_same(state.read(name), expected)
    state.verify()


def test_rows_are_read_by_themselves(tmp_path: Path) -> None:
    """Of parameters that lie in several buckets, and ranges that begin and end in any of them."""
    state, expected = written(tmp_path), dict(states())
    for rows in (slice(0, 1), slice(100, 300), slice(331, None), slice(None), slice(5, 5), slice(-2, None)):
        assert_same(state.read("odd", rows), expected["odd"], rows)
        assert_same(state.read("long", rows), expected["long"], rows)
    with pytest.raises(ValueError, match="'scale'"):
        state.read("scale", slice(0, 1))


def test_buckets_lie_as_a_disk_wants_them(tmp_path: Path) -> None:
    header = written(tmp_path).header
    assert len(header.buckets) > 3
    assert all(b.offset % ALIGNMENT == 0 and b.num_bytes % ALIGNMENT == 0 for b in header.buckets)
    assert max(b.num_bytes for b in header.buckets) <= 100_000


def test_other_float_types_are_converted(tmp_path: Path) -> None:
    half = AdamState(*(torch.arange(6).reshape(2, 3).to(torch.bfloat16) for _ in range(3)))
    write_state(tmp_path, "x", [("a", half)], num_steps=1)
    assert torch.equal(StateFile.open(tmp_path, "x").read("a").main, torch.arange(6.0).reshape(2, 3))


def test_a_flipped_byte_is_found_where_it_is_touched(tmp_path: Path) -> None:
    state = written(tmp_path)
    bucket = state.header.buckets[2]
    flip(state.path, bucket.offset + 77)
    state = StateFile.open(tmp_path, "rank-00000")
    state.read("scale")
    state.read("long")
    with pytest.raises(StateError, match=r"rank-00000\.state is damaged: bucket 2 .*'odd'.*checkpoint"):
        state.read("odd")
    with pytest.raises(StateError, match="bucket 2"):
        state.verify()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    state = written(tmp_path)
    with state.path.open("r+b") as file:
        file.truncate(state.header.num_bytes - 1)
    with pytest.raises(StateError, match=f"{state.header.num_bytes - 1} bytes, .* says {state.header.num_bytes}"):
        StateFile.open(tmp_path, "rank-00000")
    state.path.unlink()
    with pytest.raises(StateError, match=r"rank-00000\.state is missing"):
        StateFile.open(tmp_path, "rank-00000")


@pytest.mark.parametrize("position", [1, 40, 400, -30])
def test_a_damaged_header_is_refused(position: int, tmp_path: Path) -> None:
    written(tmp_path)
    flip(tmp_path / "rank-00000.json", position)
    with pytest.raises(StateError, match=r"rank-00000\.json"):
        StateFile.open(tmp_path, "rank-00000")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no header"),
        (b"[1]", "no header"),
        (b'{"a": 1}', "no header"),
        (b'{"xxh3_64": "0", "format": "other", "version": 1}', "'other' version 1"),
        (b'{"xxh3_64": "0", "format": "adamw-state", "version": 2}', "version 2"),
    ],
)
def test_a_foreign_header_is_refused(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(StateError, match=why):
        StateFile.open(tmp_path, "x")


def test_unknown_names_are_told_with_known_ones(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no parameter 'missing'; it has 'scale', 'odd', 'empty' and 2 more"):
        written(tmp_path).read("missing")
    with pytest.raises(StateError, match=r"nothing\.json is missing"):
        StateFile.open(tmp_path, "nothing")


def test_a_failed_write_leaves_no_header(tmp_path: Path) -> None:
    """Also where there was one: what it said is gone."""
    written(tmp_path)

    def breaks() -> Iterator[tuple[str, AdamState]]:
        yield next(states())
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_state(tmp_path, "rank-00000", breaks(), num_steps=13)
    with pytest.raises(StateError, match=r"rank-00000\.json is missing"):
        StateFile.open(tmp_path, "rank-00000")


def test_the_header_is_plain_json(tmp_path: Path) -> None:
    """As the documents describe it."""
    header = written(tmp_path).header
    facts = json.loads((tmp_path / "rank-00000.json").read_bytes())
    assert (facts["format"], facts["num_bytes"]) == ("adamw-state", (tmp_path / "rank-00000.state").stat().st_size)
    assert facts["parameters"]["odd"]["shape"] == [333, 77]
    assert sum(length for _, _, length in facts["parameters"]["odd"]["pieces"]) == 333 * 77
    assert [bucket["xxh3_64"] for bucket in facts["buckets"]] == [bucket.xxh3_64 for bucket in header.buckets]


def test_bytes_needed_are_two_generations() -> None:
    assert bytes_needed(2**20) == 24 * 2**20


def flip(path: Path, position: int) -> None:
    """One bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
