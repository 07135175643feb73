"""Recipes: precedence, the override grammar, and a plain refusal of everything that cannot work."""

import re
from pathlib import Path

import pytest

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.environment import ENVIRONMENT
from beamline.runtime.recipe import find_recipe, load_recipe

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

SMALL = """
run: {name: small}
rollout:
  sampling: {groups_per_step: 4, max_response_tokens: 32}
trainer:
  num_steps: 5
  optimizer: {lr: 1e-4}
data:
  evals:
    - {path: a.parquet, num_samples: 2}
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def load(recipe: str, *overrides: str, **environment: str) -> RunConfig:
    return load_recipe(recipe, overrides, environment)


def refusal(recipe: str, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(recipe, *overrides, **environment)
    return str(error.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_by_name_and_by_path(path: Path) -> None:
    config = load(path.stem)
    assert config == load(str(path))
    assert config.run.name == path.stem


def test_defaults_fill_what_the_recipe_leaves_out(small: str) -> None:
    config = load(small)
    assert (config.trainer.num_steps, config.trainer.optimizer.lr) == (5, 1e-4)
    assert config.reward == RunConfig().reward
    assert config.rollout.sampling.temperature == 1.0


def test_override_beats_environment_beats_recipe_beats_default(small: str) -> None:
    assert RunConfig().trainer.num_steps != 5
    assert load(small).trainer.num_steps == 5
    assert load(small, MAX_TRAINING_STEPS="6").trainer.num_steps == 6
    assert load(small, "trainer.num_steps=7", MAX_TRAINING_STEPS="6").trainer.num_steps == 7


def test_environment_settings(small: str) -> None:
    config = load(
        small, MODEL_PATH="/models/beam", CKPT_PATH="/ckpts", REASONING_EFFORT="high", LOGGER="wandb", RUN_NAME="mine"
    )
    kept = load(small, CKPT_INTERVAL="0", EXPORT_PATH="/exports", RESUME_MODE="latest").trainer
    assert (kept.checkpoint_interval, kept.export_path, kept.resume_mode) == (0, "/exports", "latest")
    assert (config.model.path, config.trainer.checkpoint_path, config.run.name) == ("/models/beam", "/ckpts", "mine")
    assert config.data.chat_template_kwargs == {"reasoning_effort": "high"}
    assert "wandb" in config.run.loggers
    assert load(small, MODEL_PATH="") == load(small)


def test_every_variable_is_in_the_manual() -> None:
    listed = re.findall(
        r"^\| `([A-Z_]+)` \| `([a-z_.]+)", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE
    )
    named = {variable: key for variable, (key, _) in ENVIRONMENT.items()}
    assert dict(listed) == named | {"OPTIMIZER_STATE_DISK_DIR": "trainer.optimizer.state"}


def test_the_optimizers_folder_says_where_its_state_is(small: str) -> None:
    """Set: on that disk. Set and empty: in the host's memory. Not set: as the recipe has it."""

    def optimizer(*overrides: str, **environment: str) -> tuple[str, str, float]:
        section = load(small, *overrides, **environment).trainer.optimizer
        return section.state, section.state_dir, section.lr

    on_disk = ("trainer.optimizer.state=disk", "trainer.optimizer.state_dir=/recipe")
    assert optimizer(OPTIMIZER_STATE_DISK_DIR="/nvme") == ("disk", "/nvme", 1e-4)
    assert optimizer(OPTIMIZER_STATE_DISK_DIR="") == ("host", "", 1e-4)
    assert optimizer() == ("device", "", 1e-4)
    assert optimizer(*on_disk, OPTIMIZER_STATE_DISK_DIR="/nvme") == ("disk", "/recipe", 1e-4)
    with pytest.raises(ConfigError, match=r"state=host with state_dir='/nvme'.*OPTIMIZER_STATE_DISK_DIR sets both"):
        load(small, "trainer.optimizer.state=host", OPTIMIZER_STATE_DISK_DIR="/nvme")


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("trainer.eval_interval=10", lambda c: c.trainer.eval_interval == 10),
        ("+trainer.eval_interval=10", lambda c: c.trainer.eval_interval == 10),
        ("++trainer.eval_interval=10", lambda c: c.trainer.eval_interval == 10),
        ("~trainer.num_steps", lambda c: c.trainer.num_steps == 50),
        ("~data.evals", lambda c: c.data.evals == []),
        ("algorithm.dual_clip=3", lambda c: c.algorithm.dual_clip == 3.0),
        ("algorithm.dual_clip=null", lambda c: c.algorithm.dual_clip is None),
        (
            "algorithm.off_policy.token_mask_bounds=[0.5,2]",
            lambda c: c.algorithm.off_policy.token_mask_bounds == (0.5, 2),
        ),
        ("algorithm.off_policy={importance: token}", lambda c: c.algorithm.off_policy.importance == "token"),
        ("trainer.optimizer.betas=[0.8,0.9]", lambda c: c.trainer.optimizer.betas == (0.8, 0.9)),
        ("trainer.optimizer={lr: 1e-3}", lambda c: c.trainer.optimizer.lr == 1e-3),
        ("data.evals=[{path: b.parquet, name: b}]", lambda c: c.data.evals[0].name == "b"),
        ("data.chat_template_kwargs.style=plain", lambda c: c.data.chat_template_kwargs["style"] == "plain"),
        ('run.name="007"', lambda c: c.run.name == "007"),
        ("run.placement=disaggregated", lambda c: c.run.placement.value == "disaggregated"),
        ("run.dir=${run.name}-runs", lambda c: c.run.dir == "small-runs"),
    ],
)
def test_overrides(small: str, override: str, read: object) -> None:
    assert read(load(small, override))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.lr=1e-5", ["trainer.lr", "1e-05", "trainer.optimizer.lr"]),
        ("trainer.evl_interval=10", ["trainer.evl_interval", "10", "did you mean trainer.eval_interval"]),
        ("num_steps=3", ["unknown key num_steps", "trainer.num_steps"]),
        ("~trainer.lr", ["trainer.lr", "trainer.optimizer.lr"]),
        ("rollout.sampling.temprature=1", ["rollout.sampling.temperature"]),
        ("data.evals=[{path: b, nane: x}]", ["data.evals.0.nane", "'x'", "name"]),
        ("data.evals=[{name: x}]", ["data.evals.0", "missing required field", "path"]),
        ("trainer.num_steps=many", ["trainer.num_steps='many'", "expected int"]),
        ("trainer.num_steps=-1", ["trainer.num_steps=-1", "expected int >= 0"]),
        ("trainer.optimizer.lr=-1e-6", ["trainer.optimizer.lr=-1e-06", "expected float > 0"]),
        ("run.name=7", ["run.name=7", "expected str", "in quotes"]),
        ("run.placement=elsewhere", ["run.placement", "elsewhere"]),
        ("trainer.optimizer.betas=[0.9]", ["trainer.optimizer.betas", "length 2"]),
        ("trainer=3", ["trainer"]),
        ("trainer.num_steps=1,2", ["several values"]),
        ("trainer.num_steps", ["trainer.num_steps", "key=value"]),
        ("run.dir=${nowhere}", ["nowhere"]),
        ("hydra.verbose=true", ["unknown key hydra.verbose"]),
        ("algorithm.num_mini_batches=5", ["algorithm.num_mini_batches=5 exceeds rollout.sampling.groups_per_step=4"]),
        ("reward.overlong.buffer_tokens=32", ["reward.overlong.buffer_tokens=32 must be under", "=32"]),
        ("algorithm.advantage=gae", ["algorithm.advantage='gae'", "did you mean", "grpo"]),
        ("algorithm.off_policy.importance=tokens", ["importance='tokens'", "none, token, sequence"]),
        ("algorithm.off_policy.sequence_mask=mean", ["sequence_mask='mean'", "none, geometric, product"]),
        ("algorithm.off_policy.token_mask_bounds=[2,0.5]", ["token_mask_bounds=[2.0, 0.5]", "below the second"]),
        ("algorithm.off_policy.outlier_bounds=[0,100]", ["outlier_bounds", "expected float > 0"]),
        ("algorithm.off_policy.outlier_bounds=[100]", ["outlier_bounds", "length 2"]),
        ("algorithm.off_policy.importance_cap=2", ["importance_cap=2.0 has no effect", "set importance to token"]),
        ("algorithm.off_policy.importance_cap=-1", ["importance_cap", "expected float > 0"]),
        (
            "algorithm.off_policy.sequence_mask_bounds=[0.99,1.01]",
            ["sequence_mask_bounds has no effect", "set sequence_mask to geometric"],
        ),
        (
            "algorithm.off_policy.sequence_msk=product",
            ["unknown key algorithm.off_policy.sequence_msk", "sequence_mask"],
        ),
    ],
)
def test_refusals_name_key_value_and_mend(small: str, override: str, said: list[str]) -> None:
    text = refusal(small, override)
    assert [part for part in said if part not in text] == [], text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("weights.transport=shm", "bus.blob_store=jetstream"),
            ["weights.transport=shm works on one host", "use weights.transport=nixl or checkpoint"],
        ),
        (
            ("weights.transport=nixl", "rollout.engine.shared_parameters=true"),
            ["weights.transport=nixl has none", "use weights.transport=shm"],
        ),
    ],
)
def test_transports_that_cannot_work_are_refused(small: str, overrides: tuple[str, ...], said: list[str]) -> None:
    text = refusal(small, *overrides)
    assert [part for part in said if part not in text] == [], text


def test_an_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("trainer: {nun_steps: 3}\n")
    assert refusal(str(path)) == (f"{path}: unknown key trainer.nun_steps (value 3): did you mean trainer.num_steps?")


def test_an_unknown_recipe_names_the_nearest() -> None:
    assert refusal("tiny-bean") == "recipe 'tiny-bean' does not exist: did you mean tiny-beam?"
    assert "did you mean tiny-beam?" in refusal("somewhere/tiny-bea.yaml")
    assert find_recipe("tiny-beam").name == "tiny-beam.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer:\n  num_steps: [1\n", "broken.yaml, line 3"),
        ("trainer: {num_steps: 1\n", "not YAML"),
        ("- a\n- b\n", "broken.yaml"),
        ("trainer: 3\n", "trainer"),
        ("run: {dir: '${oc.env:NOT_SET_ANYWHERE}'}\n", "NOT_SET_ANYWHERE"),
        ("defaults: [not-there]\n", "not-there"),
    ],
)
def test_a_broken_file_is_a_plain_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    assert said in refusal(str(path))


def test_a_recipe_may_build_on_another(tmp_path: Path, small: str) -> None:
    path = tmp_path / "larger.yaml"
    path.write_text("defaults: [small, _self_]\ntrainer: {num_steps: 9}\n")
    config = load(str(path))
    assert (config.trainer.num_steps, config.rollout.sampling.groups_per_step) == (9, 4)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MAX_TRAINING_STEPS", "many", "trainer.num_steps"),
        ("REASONING_EFFORT", "huge", "minimal, low"),
        ("LOGGER", "tensorflow", "console, wandb"),
        ("CKPT_INTERVAL", "often", "trainer.checkpoint_interval"),
        ("RESUME_MODE", "newest", "none, latest, from_path"),
    ],
)
def test_a_bad_environment_setting_names_variable_and_key(small: str, variable: str, value: str, said: str) -> None:
    text = refusal(small, **{variable: value})
    assert f"{variable}={value!r}" in text
    assert said in text
