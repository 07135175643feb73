"""The real engine's shards on one rank: how they lie, what they are, and what they cost."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from beamline.models import tiny
from beamline.protocol.errors import ConfigError
from beamline.trainer.megatron.build import Model, build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.slots import units_of
from beamline.weights.manifest import Piece, TensorEntry, WeightManifest
from beamline.weights.shm import ShmOwner

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

LAYER = "model.layers.1"
NUM_EXPERTS = tiny.TINY_BEAM.num_experts
SUPPORT = Path(__file__).parents[1] / "support"
ROOM_BYTES = 16 << 20


@pytest.fixture(scope="module")
def model(one_rank: None, model_dir: Path) -> Model:
    return build_model(model_dir, Layout())


def exported(model: Model, cuts: int, directory: Path) -> WeightManifest:
    owner = ShmOwner(directory / "rank-0.sock")
    try:
        owner.export(0, MegatronPolicy(model, AdamWSettings(), temperature=1.0).shards(cuts))
        return owner.describe()
    finally:
        owner.close()


def pieces_of(manifest: WeightManifest, name: str, dim: int, part: int, cuts: int) -> Iterator[tuple[Piece, int]]:
    """What one tensor-parallel rank of an engine needs of a tensor, and the bytes of each piece."""
    (entry,) = [entry for entry in manifest.tensors if entry.name == f"{LAYER}.{name}.weight"]
    for piece in entry.pieces:
        if piece.start[dim] * cuts // entry.shape[dim] == part:
            assert (piece.start[dim] + piece.shape[dim] - 1) * cuts // entry.shape[dim] == part
            yield piece, entry.num_bytes(piece)


@pytest.mark.parametrize("cuts", [1, 2])
def test_what_an_engine_keeps_as_one_parameter_lies_in_one_piece(model: Model, cuts: int, tmp_path: Path):
    manifest = exported(model, cuts, tmp_path)
    fused = {
        "qkv_proj": [(f"self_attn.{part}_proj", 0) for part in ("q", "k", "v")],
        "w13": [(f"mlp.experts.{n}.{part}_proj", 0) for n in range(NUM_EXPERTS) for part in ("gate", "up")],
        "w2": [(f"mlp.experts.{n}.down_proj", 1) for n in range(NUM_EXPERTS)],
    }
    for parameter, names in fused.items():
        for part in range(cuts):
            found = [piece for name, dim in names for piece in pieces_of(manifest, name, dim, part, cuts)]
            assert len(found) >= len(names)
            for (piece, size), (following, _) in pairwise(found):
                assert following.offset == piece.offset + size, parameter


def kind(entry: TensorEntry) -> str:
    if ".mlp.gate." in entry.name:
        return "router"
    return "norm" if "norm" in entry.name else ""


def test_in_bfloat16_the_router_stays_float32_and_groups_are_named(model_dir: Path, tmp_path: Path):
    manifest = exported(build_model(model_dir, Layout(), "bfloat16"), 1, tmp_path)
    assert {entry.group for entry in manifest.tensors} == {"", "router", "norm"}
    for entry in manifest.tensors:
        assert entry.group == kind(entry), entry.name
        assert entry.dtype == ("float32" if entry.group == "router" else "bfloat16"), entry.name


def test_a_parameter_that_changes_on_its_way_out_is_refused(model: Model):
    from megatron.bridge.models.conversion.param_mapping import RMSNorm2ZeroCenteredRMSNormMapping  # importable by now

    tasks = model.bridge.get_conversion_tasks([model.module])
    norm = next(task for task in tasks if "norm" in task.param_name)
    centred = RMSNorm2ZeroCenteredRMSNormMapping(norm.mapping.megatron_param, norm.mapping.hf_param)
    with pytest.raises(ConfigError, match=rf"parameter {norm.param_name}: RMSNorm2Zero\w+ of Megatron-Bridge cannot"):
        units_of(model, [dataclasses.replace(norm, mapping=centred)])


def test_an_export_takes_the_memory_of_its_segment_and_no_more():
    program = [sys.executable, str(SUPPORT / "trainer_export_peak.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    num_bytes, first, second = map(int, done.stdout.split())
    print(f"{num_bytes} bytes of weights raised the peak by {first}, then by {second}")
    assert num_bytes >= 256 << 20
    assert num_bytes <= first + second < 2 * num_bytes + ROOM_BYTES  # two segments, for versions that follow each other
    assert first < num_bytes + ROOM_BYTES
