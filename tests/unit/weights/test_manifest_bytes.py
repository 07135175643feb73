"""The manifest's bytes are pinned like those of every wire type."""

from pathlib import Path

from beamline.weights.manifest import TensorEntry, WeightManifest

GOLDEN = Path(__file__).with_name("WeightManifest.bin")

EXAMPLE = WeightManifest(
    policy_version=4,
    transport="shm",
    segment="/dev/shm/beamline-test/policy-00000004-1.weights",
    num_bytes=264,
    tensors=[
        TensorEntry(name="a", dtype="bfloat16", shape=[2, 3], offset=0, num_bytes=12, checksum="0123456789abcdef"),
        TensorEntry(name="b", dtype="float32", shape=[2], offset=256, num_bytes=8, checksum="fedcba9876543210"),
    ],
)


def test_manifest_bytes() -> None:
    assert EXAMPLE.encode() == GOLDEN.read_bytes()
    assert WeightManifest.decode(GOLDEN.read_bytes()) == EXAMPLE
