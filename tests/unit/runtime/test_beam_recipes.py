"""The recipes of the 501B Beam hold the published settings, and go through every check that needs no model."""

from typing import Any

import msgspec
import pytest

from beamline.coordinator.launch import preflight
from beamline.protocol.adapter import adapters_of, max_ranks
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.layout import check_layout
from beamline.runtime.recipe import load_recipe

LORA_RECIPES = ("beam-lora-2node", "beam-lora-4node")
RECIPES = (*LORA_RECIPES, "beam-fullft-8node")
GPUS_A_NODE = 8
SHARED: dict[str, Any] = {
    "model.path": "reflection/Beam-1.0-501B-A23B",
    "model.dtype": "bfloat16",
    "data.max_prompt_tokens": 2048,
    "data.chat_template_kwargs": {"reasoning_effort": "minimal"},
    "rollout.sampling.samples_per_group": 8,
    "rollout.sampling.max_response_tokens": 8192,
    "rollout.sampling.temperature": 1.0,
    "rollout.sampling.top_p": 1.0,
    "rollout.engine.tensor_parallel": 8,
    "rollout.engine.pipeline_parallel": 2,
    "reward.grader": "math_dapo",
    "reward.overlong.buffer_tokens": 4096,
    "reward.overlong.factor": 1.0,
    "algorithm.advantage": "grpo",
    "algorithm.normalize_std": True,
    "algorithm.loss": "clipped",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.28,
    "algorithm.kl.coefficient": 0.0,
    "algorithm.reduction": "token_mean",
    "algorithm.dynamic_sampling.mode": "none",
    "algorithm.drop_zero_variance": False,
    "algorithm.routing_replay": True,
    "trainer.num_steps": 50,
    "trainer.eval_interval": 5,
    "trainer.parallel.tensor": 4,
    "trainer.parallel.expert": 8,
    "coordinator.max_staleness": 0,
    "run.placement": "colocated",
    "weights.transport": "nixl",
    "bus.blob_store": "jetstream",
}
LORA: dict[str, Any] = {
    "model.lora.rank": 64,
    "model.lora.alpha": 64,
    "model.lora.dropout": 0.0,
    "model.lora.targets": ["all-linear"],
    "model.lora.normalize_moe_lora": True,
    "model.lora.sequence_parallel_input_regather": True,
    "rollout.engine.max_expert_lora_rank": 8,
    "trainer.checkpoint_interval": 10,
    "trainer.resume_mode": "none",
    "trainer.optimizer.lr": 1e-5,
    "trainer.optimizer.state": "device",
    "trainer.parallel.pipeline": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "beam-lora-2node": LORA
    | {
        "rollout.replicas": 1,
        "rollout.sampling.groups_per_step": 32,
        "algorithm.num_mini_batches": 1,
        "trainer.parallel.data": 2,
    },
    "beam-lora-4node": LORA
    | {
        "rollout.replicas": 2,
        "rollout.sampling.groups_per_step": 64,
        "algorithm.num_mini_batches": 2,
        "trainer.parallel.data": 4,
    },
    "beam-fullft-8node": {
        "model.lora.rank": 0,
        "rollout.replicas": 4,
        "rollout.sampling.groups_per_step": 64,
        "rollout.engine.max_expert_lora_rank": 0,
        "algorithm.num_mini_batches": 2,
        "trainer.recompute": True,
        "trainer.checkpoint_interval": 25,
        "trainer.resume_mode": "latest",
        "trainer.optimizer.lr": 1e-6,
        "trainer.optimizer.state": "disk",
        "trainer.parallel.pipeline": 4,
        "trainer.parallel.data": 4,
    },
}
NUM_NODES = {"beam-lora-2node": 2, "beam-lora-4node": 4, "beam-fullft-8node": 8}
DESCRIPTION = {
    "architectures": ["BeamForCausalLM"],
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_hidden_layers": 52,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "intermediate_size": 20480,
    "moe_intermediate_size": 2560,
    "vocab_size": 151936,
}
ONE_OF_EACH_KIND = {
    "model.layers.9.self_attn.q_proj.weight": (6144, 5120),
    "model.layers.9.self_attn.gate_proj.weight": (6144, 5120),
    "model.layers.9.mlp.experts.255.down_proj.weight": (5120, 2560),
    "model.layers.9.mlp.gate.weight": (256, 5120),
    "lm_head.weight": (151936, 5120),
}


def value(config: RunConfig, key: str) -> Any:
    found = msgspec.to_builtins(config)
    for part in key.split("."):
        found = found[part]
    return found


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_setting_is_the_published_one(recipe: str) -> None:
    config = load_recipe(recipe, environment={})
    expected = SHARED | OWN[recipe]
    assert {key: value(config, key) for key in expected} == expected


def test_the_nodes_gpus_are_all_used_by_both_sides(recipe: str) -> None:
    config = load_recipe(recipe, environment={})
    check_layout(config, DESCRIPTION)
    num_gpus = NUM_NODES[recipe] * GPUS_A_NODE
    engine = config.rollout.engine
    assert config.trainer.parallel.world_size == num_gpus
    assert config.rollout.replicas * engine.tensor_parallel * engine.pipeline_parallel == num_gpus


def test_an_update_has_32_prompts(recipe: str) -> None:
    config = load_recipe(recipe, environment={})
    assert config.rollout.sampling.groups_per_step / config.algorithm.num_mini_batches == 32


@pytest.mark.parametrize("recipe", LORA_RECIPES)
def test_experts_have_rank_8_and_router_and_head_no_adapter(recipe: str) -> None:
    lora = load_recipe(recipe, environment={}).model.lora
    adapters = adapters_of(ONE_OF_EACH_KIND, lora, DESCRIPTION["num_experts_per_tok"])
    assert [adapter.module.split(".", 3)[3] for adapter in adapters] == [
        "self_attn.q_proj",
        "self_attn.gate_proj",
        "mlp.experts.255.down_proj",
    ]
    assert max_ranks(adapters) == (64, 8)
    assert [adapter.scale for adapter in adapters] == [1.0, 1.0, 8.0]


def test_aime_is_logged_under_the_published_names(recipe: str) -> None:
    config = load_recipe(recipe, environment={"DATA_DIR": "/data/dapo"})
    assert config.data.train == "/data/dapo/dapo-math-17k-cleaned.parquet"
    assert [(e.path, e.name, e.num_samples, e.temperature) for e in config.data.evals] == [
        ("/data/dapo/aime-2025-cleaned.parquet", "aime-2025", 8, 1.0),
        ("/data/dapo/aime-2024-cleaned.parquet", "math_dapo", 8, 1.0),
    ]


def test_what_the_environment_sets(recipe: str) -> None:
    given = {
        "MODEL_PATH": "/models/Beam",
        "CKPT_PATH": "/ckpts/mine",
        "EXPORT_PATH": "/exports/mine",
        "CKPT_INTERVAL": "0",
        "RESUME_MODE": "latest",
        "MAX_TRAINING_STEPS": "7",
        "REASONING_EFFORT": "high",
        "LOGGER": "wandb",
        "RUN_NAME": "mine",
        "PROJECT_NAME": "our-beam",
        "LOG_PATH": "/logs/mine",
    }
    config = load_recipe(recipe, environment=given)
    trainer = config.trainer
    assert (config.model.path, config.run.name) == ("/models/Beam", "mine")
    assert (config.run.project, config.run.log_path) == ("our-beam", "/logs/mine")
    assert (trainer.checkpoint_path, trainer.export_path) == ("/ckpts/mine", "/exports/mine")
    assert (trainer.saves, trainer.resume_mode, trainer.num_steps) == (False, "latest", 7)
    assert config.data.chat_template_kwargs == {"reasoning_effort": "high"}
    assert "wandb" in config.run.loggers


@pytest.mark.parametrize(("given", "expected"), [("/nvme/state", ("disk", "/nvme/state")), ("", ("host", ""))])
def test_where_all_weights_optimizer_state_is(given: str, expected: tuple[str, str]) -> None:
    config = load_recipe("beam-fullft-8node", environment={"OPTIMIZER_STATE_DISK_DIR": given})
    assert (config.trainer.optimizer.state, config.trainer.optimizer.state_dir) == expected
    assert config.trainer.optimizer.lr == 1e-6


def test_what_a_run_writes_lies_at_home_under_its_name(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_recipe(recipe, environment={"RUN_NAME": "mine"})
    assert config.data.dir == "/home/somebody/data/dapo"
    assert config.trainer.checkpoint_path == "/home/somebody/ckpts/mine"
    assert config.trainer.export_path == "/home/somebody/exports/mine"


def test_a_machine_without_the_model_is_told_which_variable_names_it(recipe: str) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.check(load_recipe(recipe, environment={}))
    text = str(error.value)
    assert text.startswith("model.path=reflection/Beam-1.0-501B-A23B is not a directory")
    assert "MODEL_PATH" in text
