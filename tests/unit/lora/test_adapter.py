"""Which adapters a model has: against the tensors of real tiny models, counted by hand."""

import pytest

from beamline.models import tiny
from beamline.protocol.adapter import adapter_shapes, adapters_of, max_ranks
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.lora_config import LoraSection

BEAM, QWEN = dict(tiny.TINY_BEAM.shapes()), dict(tiny.TINY_QWEN3_MOE.shapes())
TOP_K = tiny.TINY_BEAM.num_experts_per_tok


def test_all_linear_layers_of_beam_have_one_and_each_expert_its_own():
    modules = [adapter.module for adapter in adapters_of(BEAM, LoraSection(rank=16), TOP_K)]
    attention, dense, experts = 4 * 5, 3, 3 * 16 * 3
    assert len(set(modules)) == len(modules) == attention + dense + experts
    assert "model.layers.0.self_attn.gate_proj" in modules, "the output gate"
    assert not [name for name in modules if name.endswith((".gate", "lm_head", "embed_tokens"))]


def test_a_model_without_an_output_gate_has_none_to_adapt():
    modules = [adapter.module for adapter in adapters_of(QWEN, LoraSection(rank=16), TOP_K)]
    assert len(modules) == 4 * 4 + 4 * 16 * 3


def test_shapes_ranks_and_scales():
    found = {one.module: one for one in adapters_of(BEAM, LoraSection(rank=16, alpha=32), TOP_K)}
    key = found["model.layers.1.self_attn.k_proj"]
    assert key.shapes == {f"{key.module}.lora_A.weight": (16, 128), f"{key.module}.lora_B.weight": (64, 16)}
    assert key.scale == 2.0
    found = {one.module: one for one in adapters_of(BEAM, LoraSection(rank=16, normalize_moe_lora=True), TOP_K)}
    down = found["model.layers.1.mlp.experts.5.down_proj"]
    assert down.shapes == {f"{down.module}.lora_A.weight": (4, 64), f"{down.module}.lora_B.weight": (128, 4)}
    assert (down.scale, found["model.layers.0.mlp.down_proj"].scale) == (4.0, 1.0), "alpha is not divided"
    assert max_ranks(list(found.values())) == (16, 4)


def test_rank_16_takes_less_than_fifteen_percent_of_the_model():
    shapes = adapter_shapes(adapters_of(BEAM, LoraSection(rank=16, normalize_moe_lora=True), TOP_K))
    assert sum(a * b for a, b in shapes.values()) == 202_752


@pytest.mark.parametrize("rank", [6, 2])
def test_a_rank_that_experts_cannot_share_is_refused_with_the_numbers(rank: int):
    with pytest.raises(ConfigError, match=rf"rank={rank} .*num_experts_per_tok=4.*use rank 4"):
        adapters_of(BEAM, LoraSection(rank=rank, normalize_moe_lora=True), TOP_K)


def test_a_target_of_which_the_model_has_no_layer_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no layer for 'linear_gate'; the nearest .*linear_"):
        adapters_of(QWEN, LoraSection(rank=4, targets=["linear_gate"]), TOP_K)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"targets": ["linear_qvk"]}, "did you mean 'linear_qkv'"),
        ({"targets": []}, "name the layers to adapt"),
        ({"targets": ["linear_qkv", "linear_fc1_up"]}, "linear_qkv, whose modules share one A, beside linear_fc1_up"),
        ({"targets": ["linear_q"], "sequence_parallel_input_regather": True}, "does not go with target linear_q"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict, words: str):
    with pytest.raises(ValueError, match=words):
        LoraSection(rank=8, **settings)


def test_overlap_needs_adapters():
    from beamline.protocol.weights_config import WeightsSection

    with pytest.raises(ValueError, match=r"weights\.pause=overlap needs adapters"):
        RunConfig(weights=WeightsSection(pause="overlap"))
