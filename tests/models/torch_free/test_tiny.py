"""Model directories: what they hold, that they are repeatable, and what each option changes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from beamline.models import assets, checkpoint_file, tiny

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


def stored_types(directory: Path) -> dict[str, str]:
    with safe_open(directory / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", tiny.SPECS)
def test_a_directory_is_complete_and_the_same_each_time(name, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        tiny.build(tiny.SPECS[name], directory, seed=3)
    assert {path.name for path in first.iterdir()} == FILES
    for file in FILES:
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_another_seed_gives_other_weights(tmp_path):
    for seed in (0, 1):
        tiny.build(tiny.TINY_BEAM, tmp_path / str(seed), seed=seed)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    one, other = (load_file(tmp_path / str(seed) / "model.safetensors")[name] for seed in (0, 1))
    assert np.abs(one - other).max() > 0.1


def test_parameter_counts_are_those_that_the_specs_promise():
    assert round(tiny.num_parameters(tiny.TINY_BEAM) / 1e6, 2) == 1.68
    assert round(tiny.num_parameters(tiny.BENCH_BEAM) / 1e6, 1) == 2.6
    assert tiny.BENCH_BEAM.num_layers == 6


def test_randomised_weights_leave_nothing_at_one_or_zero(tmp_path):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0, randomise=True)
    for name, values in load_file(tmp_path / "model.safetensors").items():
        assert values.std() > 0.01, name


def test_plain_weights_have_unit_norms_and_no_biases(tmp_path):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert (weights["model.layers.2.self_attn.q_norm.weight"] == 1).all()
    assert (weights["model.layers.2.self_attn.gate_bias"] == 0).all()
    assert (weights["model.layers.2.mlp.gate.e_score_correction_bias"] == 0).all()


def test_bfloat16_keeps_routers_in_float32(tmp_path):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0, dtype="bfloat16")
    types = stored_types(tmp_path)
    assert types["model.layers.1.mlp.gate.weight"] == types["model.layers.1.mlp.gate.e_score_correction_bias"] == "F32"
    assert types["model.layers.0.mlp.gate_proj.weight"] == types["lm_head.weight"] == "BF16"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_bfloat16_rounds_to_nearest_ties_to_even():
    # 1 + 2**-8 lies half-way between the neighbours 1 and 1 + 2**-7; 1 + 3 * 2**-8 half-way above an odd one.
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12, -2.5], np.float32)
    bits = checkpoint_file.to_bfloat16_bits(values)
    assert [hex(bit) for bit in bits] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0xc020"]


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size 256 is below the tokenizer's 512: raise it"):
        tiny.build(replace(tiny.TINY_BEAM, vocab_size=256), tmp_path, seed=0)


@pytest.mark.parametrize("name", tiny.SPECS)
def test_every_model_can_be_laid_out_by_name(name, tmp_path):
    directory = assets.materialise(name, tmp_path / "model")
    assert {path.name for path in directory.iterdir()} == FILES
    assert set(stored_types(directory)) == {tensor for tensor, _ in tiny.SPECS[name].shapes()}


def test_an_unknown_model_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(ValueError, match="no model is called 'huge-beam': use one of tiny-beam, tiny-qwen3-moe, bench"):
        assets.materialise("huge-beam", tmp_path)
