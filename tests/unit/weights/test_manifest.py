"""The manifest's bytes are pinned like those of every wire type, and what cannot be is refused where it is decoded."""

from pathlib import Path

import msgspec
import pytest

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import (
    CheckpointPlace,
    CudaChunk,
    CudaPlace,
    NixlPlace,
    Piece,
    ShmPlace,
    TensorEntry,
    WeightManifest,
)

GOLDEN = Path(__file__).with_name("WeightManifest.bin")

EXAMPLE = WeightManifest(
    policy_version=4,
    places=[
        ShmPlace(num_bytes=264, socket="weights/rank-00000.sock"),
        CudaPlace(num_bytes=512, socket="x.sock", device="GPU-1", chunks=[CudaChunk(b"handle", 512)], event=b"event"),
        NixlPlace(num_bytes=8, agent="trainer", metadata=b"opaque", address=4096),
        CheckpointPlace(num_bytes=100, path="policy-00000004/rank-00003.safetensors"),
    ],
    tensors=[
        TensorEntry(
            name="a",
            dtype="bfloat16",
            shape=(2, 3),
            pieces=[
                Piece(place=0, offset=0, start=(0, 0), shape=(1, 3), checksum="0123456789abcdef"),
                Piece(place=1, offset=256, start=(1, 0), shape=(1, 3), checksum="123456789abcdef0"),
            ],
        ),
        TensorEntry(
            name="router",
            dtype="float32",
            shape=(),
            group="router",
            pieces=[Piece(place=3, offset=96, start=(), shape=(), checksum="fedcba9876543210")],
        ),
    ],
)


def test_manifest_bytes() -> None:
    assert EXAMPLE.encode() == GOLDEN.read_bytes()
    assert WeightManifest.decode(GOLDEN.read_bytes()) == EXAMPLE


def test_the_layout_is_all_but_contents_version_and_places() -> None:
    def changed(**changes: object) -> str:
        return msgspec.structs.replace(EXAMPLE, **changes).layout

    first, second = EXAMPLE.tensors
    (piece,) = second.pieces
    other = msgspec.structs.replace(second, pieces=[msgspec.structs.replace(piece, checksum="0" * 16)])
    assert changed(policy_version=5, tensors=[first, other]) == EXAMPLE.layout
    moved = msgspec.structs.replace(second, pieces=[msgspec.structs.replace(piece, offset=92)])
    kinds = {
        EXAMPLE.layout,
        changed(tensors=[first, moved]),
        changed(tensors=[second, first]),
        changed(tensors=[first, msgspec.structs.replace(second, dtype="int32")]),
        changed(tensors=[first, msgspec.structs.replace(second, name="gate")]),
        changed(places=[*EXAMPLE.places, EXAMPLE.places[0]]),
    }
    assert len(kinds) == 6


def entry(piece: tuple[object, ...] = (0, 0, [0], [2], "0" * 16), **changes: object) -> dict[str, object]:
    return {"name": "w", "dtype": "float32", "shape": [2], "pieces": [piece], **changes}


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([entry(dtype="float33")], "tensor w: dtype 'float33'"),
        ([entry(), entry()], "tensor w appears twice"),
        ([entry((1, 0, [0], [2], ""))], "tensor w: place 1, there are 1"),
        ([entry((0, 1000, [0], [2], ""))], "bytes 1000 to 1008 of a place of 1000 bytes"),
        ([entry((0, 0, [1], [2], ""))], r"a piece of shape \[2\] at \[1\] does not lie in \[2\]"),
        ([entry((0, 0, [0, 0], [2, 1], ""))], "does not lie in"),
        ([entry((0, 0, [0], [2, 1], ""))], "does not lie in"),
        ([entry((0, 0, [2**52], [2**52], ""), shape=[2**53 - 1])], "does not lie in"),
        ([entry((0, 0, [0], [2**52], ""), shape=[2**52])], "of a place of 1000 bytes"),
        ([entry((0, -1, [0], [2], ""))], "not a weight manifest: Expected `int` >= 0"),
        ([entry((-1, 0, [0], [2], ""))], "not a weight manifest: Expected `int` >= 0"),
        ([entry((0, 0, [-2], [2], ""))], "not a weight manifest: Expected `int` >= 0"),
        ([entry((0, 0, [0], [-2], ""))], "not a weight manifest: Expected `int` >= 0"),
        ([entry(shape=[-2])], "not a weight manifest: Expected `int` >= 0"),
        ([entry(shape=[2**60])], "not a weight manifest: Expected `int` <"),
        ([entry(shape=[2] * 100_000)], "not a weight manifest: Expected `array` of length <= 16"),
        ([entry((0, 0, [0], [2]))], "not a weight manifest: Expected `array`"),
        ([entry(extra=1)], "unknown field `extra`"),
        ([entry(name=3)], "Expected `str`"),
    ],
)
def test_an_impossible_manifest_is_refused(entries: list[dict[str, object]], text: str) -> None:
    place = {"type": "shm", "socket": "/x", "num_bytes": 1000}
    wire = {"type": "WeightManifest/1", "policy_version": 1, "places": [place], "tensors": entries}
    with pytest.raises(WeightError, match=text):
        WeightManifest.decode(msgspec.msgpack.encode(wire))


@pytest.mark.parametrize("kind", [ShmPlace, CudaPlace, NixlPlace, CheckpointPlace])
def test_a_place_of_less_than_nothing_is_refused(kind: type[msgspec.Struct]) -> None:
    (place,) = [place for place in EXAMPLE.places if isinstance(place, kind)]
    wire = msgspec.msgpack.decode(EXAMPLE.encode())
    wire["places"] = [{**msgspec.to_builtins(place), "num_bytes": -1}]
    with pytest.raises(WeightError, match="Expected `int` >= 0"):
        WeightManifest.decode(msgspec.msgpack.encode(wire))
