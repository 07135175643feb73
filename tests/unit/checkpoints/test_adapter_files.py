"""Adapters in PEFT's format: right for a reader with one alpha / rank, and read back as they were, to the bit."""

import json
from pathlib import Path

import numpy as np
import pytest

from adapter_checkpoints import adapters_with, write
from beamline.models.checkpoint_file import to_bfloat16_bits
from beamline.protocol.adapter import Adapter, adapter_shapes
from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.adapter_files import CONFIG, PREFIX, WEIGHTS, AdapterFiles
from beamline.runtime.tensor_file import TensorFile
from lora_variants import ALL
from made_adapters import made

BASE = Path("models/base")
BEAM = "tiny-beam"


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """To a type, as float32."""
    return values if dtype == "float32" else (to_bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ALL)
def test_adapters_are_read_back_to_the_bit_and_one_scale_is_right_for_all(tmp_path: Path, variant: str, dtype: str):
    adapters = adapters_with(BEAM, ALL[variant])
    tensors = made(adapters)
    write(tmp_path, adapters, BASE, tensors, dtype)
    config, stored, files = json.loads((tmp_path / CONFIG).read_text()), TensorFile(tmp_path / WEIGHTS), None
    files = AdapterFiles(tmp_path)
    files.check(adapters)
    assert {tensor.dtype for tensor in stored.tensors.values()} == {"F32" if dtype == "float32" else "BF16"}
    for adapter in adapters:
        for name in adapter.shapes:
            assert np.array_equal(files.read(name), rounded(tensors[name], dtype)), name
        read_plainly = stored.read(PREFIX + adapter.b) * (config["lora_alpha"] / config["r"])
        assert np.array_equal(read_plainly, rounded(tensors[adapter.b], dtype) * adapter.scale), adapter.module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_factor_that_is_no_power_of_two_is_exact_in_the_wider_type(tmp_path: Path, dtype: str):
    """As of a model whose tokens go to six experts."""
    common = {"alpha": 12, "in_features": 16, "out_features": 40}
    dense = Adapter(module="model.layers.0.self_attn.o_proj", target="linear_proj", rank=12, **common)
    expert = Adapter(module="model.layers.0.mlp.experts.0.down_proj", target="linear_fc2", rank=2, **common)
    tensors = made([dense, expert])
    write(tmp_path, [dense, expert], BASE, tensors, dtype)
    files, stored = AdapterFiles(tmp_path), TensorFile(tmp_path / WEIGHTS)
    assert stored.tensors[PREFIX + expert.b].dtype == {"float32": "F64", "bfloat16": "F32"}[dtype]
    assert stored.tensors[PREFIX + expert.a].dtype == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    for name, values in tensors.items():
        assert np.array_equal(files.read(name), rounded(values, dtype)), name


def test_peft_is_told_of_ranks_alphas_and_modules_that_it_would_not_find(tmp_path: Path):
    write(tmp_path, adapters_with(BEAM, ALL["norm-alpha2"]), BASE, made(adapters_with(BEAM, ALL["norm-alpha2"])))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (8, 16, "LORA")
    assert config["base_model_name_or_path"] == str(BASE.resolve())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    of_parameters = ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "self_attn.gate_proj.weight"]
    assert config["target_parameters"] == of_parameters
    fused, single = config["rank_pattern"]
    assert config["rank_pattern"] == {fused: 4, single: 2} and config["alpha_pattern"] == {fused: 8, single: 4}


def test_no_pattern_is_written_where_all_ranks_are_one(tmp_path: Path):
    write(tmp_path, adapters_with(BEAM, ALL["full-alpha1"]), BASE, made(adapters_with(BEAM, ALL["full-alpha1"])))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] == {}


def test_what_is_missing_foreign_or_of_another_shape_is_named(tmp_path: Path):
    lora = LoraSection(rank=4, targets=["linear_proj"])
    adapters = adapters_with(BEAM, lora)
    write(tmp_path / "whole", adapters, BASE, made(adapters))
    files = AdapterFiles(tmp_path / "whole")
    with pytest.raises(WeightError, match=r"whole has no tensor model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight"):
        files.check(adapters_with(BEAM, LoraSection(rank=4)))
    with pytest.raises(WeightError, match=r"o_proj\.lora_A\.weight in .* has shape \[4, 128\], expected \[8, 128\]"):
        files.check(adapters_with(BEAM, LoraSection(rank=8, targets=["linear_proj"])))
    with pytest.raises(WeightError, match=r"has a tensor base_model\.model\.model\.layers\.3\.self_attn\.o_proj"):
        files.check([adapter for adapter in adapters if ".3." not in adapter.module])


def test_a_value_that_is_not_finite_is_named(tmp_path: Path):
    adapters = adapters_with(BEAM, LoraSection(rank=4, targets=["linear_proj"]))
    tensors = made(adapters)
    tensors[adapters[1].b][3, 2] = np.nan
    write(tmp_path, adapters, BASE, tensors)
    with pytest.raises(WeightError, match=rf"{adapters[1].b} in .* is not finite at \[3, 2\]"):
        AdapterFiles(tmp_path).read(adapters[1].b)


@pytest.mark.parametrize(
    ("name", "harm", "expected"),
    [
        (WEIGHTS, lambda content: content[:-4], r"adapter_model\.safetensors has .* bytes where its header says"),
        (WEIGHTS, lambda content: content[:100], r"adapter_model\.safetensors is no safetensors file: it ends inside"),
        (WEIGHTS, lambda content: b"\xff" * 64, r"adapter_model\.safetensors is no safetensors file: its header would"),
        (WEIGHTS, lambda content: b"", r"adapter_model\.safetensors is no safetensors file"),
        (CONFIG, lambda content: content[:-9], r"adapter_config\.json does not describe adapters"),
        (CONFIG, lambda content: b"[]", r"adapter_config\.json does not describe adapters"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, harm, expected: str):
    adapters = adapters_with(BEAM, LoraSection(rank=4, targets=["linear_proj"]))
    write(tmp_path, adapters, BASE, made(adapters))
    (tmp_path / name).write_bytes(harm((tmp_path / name).read_bytes()))
    with pytest.raises(WeightError, match=expected):
        AdapterFiles(tmp_path)


def test_a_tensor_out_of_order_is_a_mistake_of_the_caller(tmp_path: Path):
    adapters = adapters_with(BEAM, LoraSection(rank=4, targets=["linear_proj"]))
    tensors = made(adapters)
    renamed = dict(zip(adapter_shapes(adapters), reversed(tensors.values()), strict=True))
    with pytest.raises(AssertionError, match="comes in place of"):
        write(tmp_path, adapters, BASE, renamed)
