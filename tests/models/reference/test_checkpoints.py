"""Directories that the torch-free builder writes are what transformers' own models load and save."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from beamline.models import tiny
from beamline.models.beam_config import BeamConfig


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", tiny.SPECS)
def test_every_weight_is_expected_and_none_is_missing(name, dtype, tmp_path):
    tiny.build(tiny.SPECS[name], tmp_path, seed=1, dtype=dtype, randomise=True)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == getattr(torch, dtype)
    assert sum(p.numel() for p in model.parameters()) == tiny.num_parameters(tiny.SPECS[name]) - sum(
        shape[0] for tensor, shape in tiny.SPECS[name].shapes() if tensor.endswith("e_score_correction_bias")
    )


@pytest.mark.parametrize("name", ["tiny-beam", "tiny-qwen3-moe"])
def test_what_transformers_saves_again_is_the_same(name, tmp_path):
    built, saved = tmp_path / "built", tmp_path / "saved"
    tiny.build(tiny.SPECS[name], built, seed=1, randomise=True)
    AutoModelForCausalLM.from_pretrained(built, dtype=torch.float32).save_pretrained(saved)
    before, after = load_file(built / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


def test_bfloat16_is_rounded_as_torch_rounds(tmp_path):
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    tiny.build(tiny.TINY_BEAM, exact, seed=2)
    tiny.build(tiny.TINY_BEAM, rounded, seed=2, dtype="bfloat16")
    before, after = load_file(exact / "model.safetensors"), load_file(rounded / "model.safetensors")
    for tensor, values in before.items():
        assert torch.equal(values.to(after[tensor].dtype), after[tensor])


def test_our_configuration_has_the_fields_and_defaults_of_transformers_own():
    assert BeamConfig().to_dict() == transformers.BeamConfig().to_dict()
    tiny_config = tiny.TINY_BEAM.config()
    assert BeamConfig(**tiny_config).to_dict() == transformers.BeamConfig(**tiny_config).to_dict()
