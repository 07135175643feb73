"""Cuts of a model that cannot be: refused before anything starts, with the numbers that clash and the mend."""

import json
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.launch import preflight
from beamline.models import assets
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.layout import check_layout

BEAM = {
    "architectures": ["BeamForCausalLM"],
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_hidden_layers": 52,
    "num_experts": 256,
    "intermediate_size": 20480,
    "moe_intermediate_size": 2560,
    "vocab_size": 151936,
}


def changed(config: RunConfig, *overrides: str) -> RunConfig:
    tree = msgspec.to_builtins(config)
    for override in overrides:
        key, value = override.split("=")
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place[section]
        place[leaf] = json.loads(value) if value[0].isdigit() else value
    return msgspec.convert(tree, RunConfig)


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["trainer.parallel.tensor=8"], ["trainer.parallel.tensor=8", "num_attention_heads=4", "use 1, 2 or 4"]),
        (["trainer.parallel.tensor=4"], ["trainer.parallel.tensor=4", "num_key_value_heads=2", "use 1 or 2"]),
        (
            ["trainer.parallel.tensor=2", "model.lora.rank=7"],
            ["trainer.parallel.tensor=2", "model.lora.rank=7", "use rank 6 or 8"],
        ),
        (["trainer.parallel.expert=3"], ["trainer.parallel.expert=3", "num_experts=16", "use 1, 2, 4, 8 or 16"]),
        (["trainer.parallel.pipeline=9"], ["trainer.parallel.pipeline=9", "num_hidden_layers=6", "use 6 or less"]),
        (
            ["trainer.parallel.expert=4", "trainer.parallel.tensor=2"],
            ["trainer.parallel.expert=4", "trainer.parallel.tensor=2 x trainer.parallel.data=1 = 2", "use 1 or 2"],
        ),
        (
            ["trainer.parallel.data=3"],
            ["trainer.parallel.data=3", "groups_per_step=64 x samples_per_group=8 = 512", "use a divisor"],
        ),
        (
            ["trainer.parallel.data=16", "algorithm.num_mini_batches=64"],
            ["trainer.parallel.data=16 exceeds the 8 trajectories", "num_mini_batches=64", "lower it to 8 or less"],
        ),
        (["trainer.max_tokens_per_micro_batch=100"], ["max_tokens_per_micro_batch=100", "= 128: raise it"]),
        (["rollout.engine.tensor_parallel=8"], ["rollout.engine.tensor_parallel=8", "num_attention_heads=4"]),
        (["rollout.engine.tensor_parallel=4"], ["rollout.engine.tensor_parallel=4", "num_key_value_heads=2"]),
        (
            ["rollout.engine.pipeline_parallel=7"],
            ["rollout.engine.pipeline_parallel=7", "num_hidden_layers=6", "use 6 or less"],
        ),
        (
            ["model.path=asset:tiny-qwen3-moe", "trainer.parallel.pipeline=3"],
            ["trainer.parallel.pipeline=3", "num_hidden_layers=4", "use 1, 2 or 4"],
        ),
    ],
)
def test_a_cut_that_cannot_be(config: RunConfig, overrides: list[str], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.check(changed(config, *overrides))
    for text in texts:
        assert text in str(error.value)


def test_a_vocabulary_that_cannot_be_shared_out(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.tensor=2 does not divide the model's vocab_size=511"):
        check_layout(changed(config, "trainer.parallel.tensor=2"), {"vocab_size": 511})


def test_a_model_of_ones_own_is_looked_at_too(config: RunConfig, tmp_path: Path) -> None:
    model = assets.materialise("bench", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"tensor=4 does not divide the model's num_key_value_heads=2"):
        preflight.check(changed(config, f"model.path={model}", "trainer.parallel.tensor=4"))


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2},
        {"expert": 2, "data": 2},
        {"pipeline": 2},
        {"pipeline": 5},
        {"data": 2},
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert": 4, "data": 4, "pipeline": 3},
    ],
)
def test_cuts_that_can_be(config: RunConfig, layout: dict[str, int]) -> None:
    """Beam's stages may hold unequal numbers of layers."""
    preflight.check(changed(config, *(f"trainer.parallel.{name}={value}" for name, value in layout.items())))


@pytest.mark.parametrize(
    ("tensor", "expert", "pipeline", "data"), [(4, 8, 2, 2), (4, 8, 2, 4), (4, 8, 4, 4), (4, 8, 8, 2)]
)
def test_beam_in_its_published_layouts(config: RunConfig, tensor: int, expert: int, pipeline: int, data: int) -> None:
    sizes = {"tensor": tensor, "expert": expert, "pipeline": pipeline, "data": data}
    cut = changed(
        config,
        *(f"trainer.parallel.{name}={value}" for name, value in sizes.items()),
        "rollout.engine.tensor_parallel=8",
        "rollout.engine.pipeline_parallel=2",
    )
    check_layout(cut, BEAM)
    assert cut.trainer.parallel.world_size in (16, 32, 64)
