"""Beam's configuration reads and checks as transformers' own does; run in every environment that has transformers."""

import json

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from beamline.models import tiny
from beamline.models.beam_config import BeamConfig, register

register()


@pytest.fixture
def directory(tmp_path):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    return tmp_path


def test_defaults_are_those_of_the_large_model():
    config = BeamConfig()
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 51]
    assert config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 49
    assert config.rope_parameters["full_attention"] is None
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.num_experts, config.num_experts_per_tok, config.n_group, config.topk_group) == (256, 8, 8, 4)


def test_a_model_directory_is_read_by_auto_config(directory):
    config = AutoConfig.from_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    assert config.model_type == "beam"
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window", "eos_token_id", "head_dim"):
        assert getattr(config, name) == written[name]


def test_a_configuration_survives_saving(directory, tmp_path):
    config = BeamConfig(**tiny.TINY_BEAM.config())
    config.save_pretrained(tmp_path / "saved")
    again = BeamConfig.from_pretrained(tmp_path / "saved")
    for name in tiny.TINY_BEAM.config():
        assert getattr(again, name) == getattr(config, name), name


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(Exception, match=r"num_attention_heads \(6\) must be a multiple of num_key_value_heads \(4\)"):
        BeamConfig(num_attention_heads=6, num_key_value_heads=4)


def test_an_unknown_rope_type_is_refused():
    rope = {"sliding_attention": {"rope_type": "spiral", "rope_theta": 1e4}, "full_attention": None}
    with pytest.raises(Exception, match=r"rope_parameters\['sliding_attention'\] has rope_type 'spiral'"):
        BeamConfig(rope_parameters=rope)


def test_registering_twice_is_harmless():
    before = CONFIG_MAPPING["beam"]
    register()
    assert CONFIG_MAPPING["beam"] is before
