"""A model with adapters merged into it: to the bit what float64 gives rounded once, in the model's own files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapter_checkpoints import adapters_with, write
from beamline.models import tiny
from beamline.models.checkpoint_file import to_bfloat16_bits
from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime import adapter_merge
from beamline.runtime.adapter_merge import adapters_in, merge
from beamline.runtime.base_identity import BaseIdentity
from beamline.runtime.tensor_file import TensorFile
from lora_variants import ALL
from made_adapters import made, merged

BEAM, VARIANT = "tiny-beam", "norm-alpha2"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "base"
    tiny.build(tiny.SPECS[BEAM], directory, seed=7, randomise=True)
    return directory


@pytest.fixture(scope="module")
def source(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    adapters = adapters_with(BEAM, ALL[VARIANT])
    write(directory, adapters, base, made(adapters))
    return directory


def expected_of(base: Path, variant: str = VARIANT) -> dict[str, np.ndarray]:
    adapters = adapters_with(BEAM, ALL[variant])
    weights = {name: TensorFile(base / "model.safetensors").read(name) for name in dict(tiny.SPECS[BEAM].shapes())}
    return merged(weights, adapters, made(adapters))


@pytest.mark.parametrize("block", [1 << 22, 1000])
def test_every_weight_is_the_sum_rounded_once(
    base: Path, source: Path, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter_merge, "BLOCK_ELEMENTS", block)
    done: list[int] = []
    merge(base, adapters_in(base, ALL[VARIANT]), source, tmp_path, done.append)
    found, expected = load_file(tmp_path / "model.safetensors"), expected_of(base)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name
    header = len(TensorFile(base / "model.safetensors").header)
    assert sum(done) == (base / "model.safetensors").stat().st_size - header
    assert not np.array_equal(found["model.layers.0.self_attn.gate_proj.weight"], load_file(base / "model.safetensors")[
        "model.layers.0.self_attn.gate_proj.weight"
    ])  # fmt: skip


def test_a_bfloat16_model_stays_one_and_its_float32_tensors_stay_float32(tmp_path: Path):
    tiny.build(tiny.SPECS[BEAM], tmp_path / "base", seed=7, randomise=True, dtype="bfloat16")
    adapters = adapters_with(BEAM, ALL[VARIANT])
    write(tmp_path / "adapter", adapters, tmp_path / "base", made(adapters))
    (tmp_path / "merged").mkdir()
    merge(tmp_path / "base", adapters, tmp_path / "adapter", tmp_path / "merged")
    before, after = (TensorFile(tmp_path / which / "model.safetensors") for which in ("base", "merged"))
    assert after.tensors == before.tensors and "F32" in {stored.dtype for stored in after.tensors.values()}
    for name, values in expected_of(tmp_path / "base").items():
        stored = after.tensors[name]
        wanted = to_bfloat16_bits(values) if stored.dtype == "BF16" else values
        assert after.raw(stored.first_byte, stored.num_bytes) == wanted.tobytes(), name


def test_shards_and_index_are_the_models_own(base: Path, source: Path, tmp_path: Path):
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(base / "model.safetensors")
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    places = {tensor: names[number % 3] for number, tensor in enumerate(sorted(tensors))}
    inside = {file: [tensor for tensor in places if places[tensor] == file] for file in names}
    for file in names:
        save_file({tensor: tensors[tensor] for tensor in inside[file]}, tmp_path / "base" / file)
    (tmp_path / "base" / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (tmp_path / "merged").mkdir()
    merge(tmp_path / "base", adapters_in(tmp_path / "base", ALL[VARIANT]), source, tmp_path / "merged")
    assert (tmp_path / "merged" / INDEX).read_bytes() == (tmp_path / "base" / INDEX).read_bytes()
    expected = expected_of(base)
    for file in names:
        found = load_file(tmp_path / "merged" / file)
        assert sorted(found) == inside[file]
        for tensor, values in found.items():
            assert np.array_equal(values, expected[tensor]), tensor


@pytest.mark.parametrize(
    ("planted", "num_wrong"),
    [
        (lambda module: module.replace(".experts.1.", ".experts.2."), 9),
        (lambda module: module.replace(".self_attn.k_proj", ".self_attn.v_proj"), 4),
    ],
)
def test_adapters_in_anothers_place_are_seen(base: Path, tmp_path: Path, planted, num_wrong: int):
    """Experts permuted, or v given k's A: what `merged` calls right is not what comes of it."""
    adapters = adapters_with(BEAM, ALL["split-norm-alpha2"])
    tensors = made(adapters)
    for name in [name for name in tensors if name != planted(name) and planted(name) in tensors]:
        if tensors[name].shape == tensors[planted(name)].shape:
            tensors[planted(name)] = tensors[name]
    write(tmp_path / "adapter", adapters, base, tensors)
    (tmp_path / "merged").mkdir()
    merge(base, adapters, tmp_path / "adapter", tmp_path / "merged")
    found, expected = load_file(tmp_path / "merged" / "model.safetensors"), expected_of(base, "split-norm-alpha2")
    assert sum(not np.array_equal(found[name], values) for name, values in expected.items()) == num_wrong


def test_a_model_that_lacks_an_adapted_weight_or_has_another_shape_is_refused(base: Path, source: Path, tmp_path: Path):
    adapters = adapters_in(base, ALL[VARIANT])
    tensors = load_file(base / "model.safetensors")
    name = f"{adapters[3].module}.weight"
    kept = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "merged").mkdir()
    with pytest.raises(WeightError, match=f"has no tensor {name}, to which an adapter in"):
        merge(tmp_path, adapters, source, tmp_path / "merged")
    save_file({**tensors, name: np.ascontiguousarray(kept[:-1])}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=f"tensor {name} in .* is F32 .*, expected floats of shape"):
        merge(tmp_path, adapters, source, tmp_path / "merged")


def test_a_damaged_model_is_named(base: Path, source: Path, tmp_path: Path):
    content = (base / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1000])
    with pytest.raises(WeightError, match=r"model\.safetensors has .* bytes where its header says .*: it is damaged"):
        merge(tmp_path, adapters_in(base, ALL[VARIANT]), source, tmp_path / "merged")


def test_weights_are_told_apart_wherever_they_lie(base: Path, tmp_path: Path):
    known = BaseIdentity.of(base)
    shutil.copytree(base, tmp_path / "moved")
    assert BaseIdentity.of(tmp_path / "moved").is_of(known) and known.path == str(base.resolve())
    tiny.build(tiny.SPECS[BEAM], tmp_path / "other", seed=8, randomise=True)
    assert not BaseIdentity.of(tmp_path / "other").is_of(known)
    tensors = load_file(base / "model.safetensors")
    save_file({name: values + 1e-3 for name, values in tensors.items()}, tmp_path / "moved" / "model.safetensors")
    assert not BaseIdentity.of(tmp_path / "moved").is_of(known)
    with pytest.raises(WeightError, match=r"has no \*\.safetensors file: it holds no model"):
        BaseIdentity.of(tmp_path)


def test_adapters_of_a_model_are_those_of_its_shapes(base: Path):
    for lora in (ALL[VARIANT], LoraSection(rank=4, targets=["linear_gate", "linear_fc2"])):
        found = {adapter.module: adapter for adapter in adapters_in(base, lora)}
        assert found == {adapter.module: adapter for adapter in adapters_with(BEAM, lora)}
