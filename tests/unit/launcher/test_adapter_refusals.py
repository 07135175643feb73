"""Adapters that a model cannot have, or an engine has no room for: refused before anything starts, with the mend."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator.launch import preflight
from beamline.coordinator.launch.adapters import adapters_for, num_adapter_parameters
from beamline.coordinator.launch.disk_room import places
from beamline.models import assets
from beamline.protocol.config import EngineSection, RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.lora_config import LoraSection

RANK, TOP_K = 16, 4


def with_lora(config: RunConfig, path: Path | str = "asset:tiny-beam", /, **settings: object) -> RunConfig:
    lora = replace(LoraSection(rank=RANK, normalize_moe_lora=True), **settings)
    return replace(config, model=replace(config.model, path=str(path), lora=lora))


def with_engine(config: RunConfig, **settings: int) -> RunConfig:
    return replace(config, rollout=replace(config.rollout, engine=EngineSection(**settings)))


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        preflight.check_model(config)
    return str(error.value)


@pytest.fixture(params=["made later", "a directory"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same model, as it is known before and after it was made."""
    if request.param == "made later":
        return "asset:tiny-beam"
    return str(assets.materialise("tiny-beam", tmp_path / "model"))


def test_adapters_that_fit_pass(config: RunConfig, model: str) -> None:
    preflight.check_model(with_lora(config, model))
    preflight.check_model(with_lora(config, "asset:tiny-qwen3-moe"))
    preflight.check_model(with_engine(with_lora(config, model), max_expert_lora_rank=RANK // TOP_K))


def test_a_rank_that_the_experts_do_not_divide(config: RunConfig, model: str) -> None:
    text = refusal(with_lora(config, model, rank=18))
    assert text.startswith("model.lora.rank=18 is no multiple of the model's num_experts_per_tok=4")
    assert text.endswith("use rank 16 or 20")
    preflight.check_model(with_lora(config, model, rank=18, normalize_moe_lora=False))


def test_a_target_without_layers_is_answered_with_the_nearest(config: RunConfig) -> None:
    """Qwen3-MoE's attention has no output gate."""
    text = refusal(with_lora(config, "asset:tiny-qwen3-moe", targets=["linear_gate"]))
    assert text.startswith("model.lora.targets: the model has no layer for 'linear_gate'")
    assert "linear_q" in text


def test_expert_slots_below_the_experts_rank(config: RunConfig, model: str) -> None:
    text = refusal(with_engine(with_lora(config, model), max_expert_lora_rank=2))
    assert text.startswith("rollout.engine.max_expert_lora_rank=2 is below 4, the rank of an expert's adapters")
    assert "model.lora.rank=16: use 4, or 0" in text


def test_slots_that_leave_no_cache(config: RunConfig, model: str) -> None:
    large = with_lora(config, model, rank=1024, normalize_moe_lora=False)
    text = refusal(with_engine(large, kv_cache_mib=64, adapter_slots=3))
    num_bytes = 3 * 4 * num_adapter_parameters(adapters_for(large))
    assert text.startswith("rollout.engine.kv_cache_mib=64 has no room for a key-value cache beside ")
    assert f"adapter_slots=3 versions of the adapters, which take {num_bytes / 2**20:.0f} MiB of a rank" in text
    preflight.check_model(with_engine(large, kv_cache_mib=num_bytes // 2**20 + 1, adapter_slots=3))


def test_a_damaged_file_is_named(config: RunConfig, tmp_path: Path) -> None:
    model = assets.materialise("tiny-beam", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"\xff" * 64)
    text = refusal(with_lora(config, model))
    assert text.startswith(f"model.path={model}: {model / 'model.safetensors'} ") and "copy the model again" in text


def test_state_and_checkpoints_have_room_for_adapters_alone(config: RunConfig, tmp_path: Path) -> None:
    """An export has the adapters and the merged model."""
    full = {place.setting: place.num_bytes for place in places(config)}
    lora = with_lora(config, "asset:bench")
    count = num_adapter_parameters(adapters_for(lora))
    found = {place.setting: place.num_bytes for place in places(lora)}
    assert found["trainer.checkpoint_path"] == 16 * count < full["trainer.checkpoint_path"] / 5
    assert found["trainer.export_path"] == full["trainer.export_path"] + 4 * count
