"""What is refused before anything starts: one plain line that names the thing, the value and the mend."""

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator.launch import local, preflight, run_folder
from beamline.coordinator.launch.run import run
from beamline.models import assets
from beamline.protocol.config import EvalSet, RunConfig
from beamline.protocol.errors import ConfigError
from launcher_fakes import LineDisplay, fake_command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return assets.materialise("bench", tmp_path / "model")


def with_model(config: RunConfig, path: Path | str) -> RunConfig:
    return replace(config, model=replace(config.model, path=str(path)))


def with_train(config: RunConfig, path: Path | str) -> RunConfig:
    return replace(config, data=replace(config.data, train=str(path)))


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as error:
        preflight.check(config)
    return str(error.value)


OWN = """
from beamline.algorithms.losses import clipped_loss as loss
def advantage(rewards):
    return rewards
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def with_algorithm(config: RunConfig, **settings: str) -> RunConfig:
    return replace(config, algorithm=replace(config.algorithm, **settings))


@pytest.mark.usefixtures("own")
def test_code_of_the_users_own_loads_where_it_is_called(config: RunConfig) -> None:
    """A loss needs torch, which the trainer alone has; so would an advantage beside it, which the coordinator calls."""
    preflight.check(with_algorithm(config, loss="own_algorithm:loss"))
    text = refusal(with_algorithm(config, advantage="own_algorithm:advantage"))
    assert text.startswith("algorithm.advantage=own_algorithm:advantage: own_algorithm cannot be imported (No module")
    text = refusal(with_algorithm(config, loss="own_algorithm:lose"))
    assert text == "algorithm.loss=own_algorithm:lose: own_algorithm has no function or class lose"


def test_a_sound_configuration_passes(config: RunConfig, model: Path) -> None:
    preflight.check(config)
    preflight.check(with_model(config, model))


def test_a_missing_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services/rollout/.venv/bin/python is missing: run `make setup`"):
        local.interpreter("rollout", tmp_path)


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ("tokenizer.json", "has no tokenizer.json: save the model's tokenizer there"),
        ("config.json", "has no config.json: give a Hugging Face directory"),
        ("model.safetensors", "has neither model.safetensors nor model.safetensors.index.json"),
        ("chat_template.jinja", "has no chat template"),
    ],
)
def test_a_model_that_lacks_a_file(config: RunConfig, model: Path, lost: str, text: str) -> None:
    (model / lost).unlink()
    assert text in refusal(with_model(config, model))
    assert str(model) in refusal(with_model(config, model))


def test_a_model_that_lacks_a_shard(config: RunConfig, model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "lacks model-2.safetensors, which model.safetensors.index.json names" in refusal(with_model(config, model))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM is not supported: use one of Beam"),
        ({"max_position_embeddings": 100}, "max_response_tokens=64 exceed the model's max_position_embeddings=100"),
        ({"vocab_size": 7}, "the tokenizer has 512 tokens and config.json vocab_size=7"),
    ],
)
def test_a_model_that_does_not_fit(config: RunConfig, model: Path, changes: dict[str, object], text: str) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert text in refusal(with_model(config, model))


def test_an_argument_that_the_chat_template_refuses(config: RunConfig, model: Path) -> None:
    data = replace(config.data, chat_template_kwargs={"reasoning_effort": "heroic"})
    text = refusal(with_model(replace(config, data=data), model))
    assert text.startswith("data.chat_template_kwargs={'reasoning_effort': 'heroic'}: the model's chat template says:")


def test_models_that_are_not_there(config: RunConfig, tmp_path: Path) -> None:
    assert "no model is called 'giant'; use asset:tiny-beam" in refusal(with_model(config, "asset:giant"))
    assert "is not a directory" in refusal(with_model(config, tmp_path / "nowhere"))
    assert "model.path is empty" in refusal(with_model(config, ""))


def test_data_that_is_not_there(config: RunConfig, tmp_path: Path) -> None:
    assert "beamline data prepare" in refusal(with_train(config, tmp_path / "gsm8k.parquet"))
    assert "no such task; the only one is task:chained-sums" in refusal(with_train(config, "task:poems"))
    assert "data.train is empty" in refusal(with_train(config, ""))
    broken = tmp_path / "broken.parquet"
    broken.write_text("not parquet")
    assert f"data.train: {broken} is not a parquet file" in refusal(with_train(config, broken))


def test_two_evaluations_of_one_name(config: RunConfig) -> None:
    sets = [EvalSet(path="task:chained-sums", name="sums"), EvalSet(path="task:chained-sums", name="sums")]
    assert "2 sets are called 'sums'" in refusal(replace(config, data=replace(config.data, evals=sets)))


async def test_an_earlier_run_is_not_replaced_unasked(config: RunConfig) -> None:
    path = Path(config.run.dir) / config.run.name
    folder = run_folder.RunFolder.create(config, overwrite=False)
    folder.fill(config, [].append)
    with pytest.raises(ConfigError, match="is in use by a run: end it with `beamline stop trial`"):
        run_folder.RunFolder.create(config, overwrite=True)
    folder.release()
    with pytest.raises(ConfigError, match=r"exists already: .*run.name=trial-2.*--overwrite"):
        await run(config, LineDisplay(), command=fake_command())
    (path / "left-over").touch()
    run_folder.RunFolder.create(config, overwrite=True).release()
    assert not (path / "left-over").exists()


def test_a_folder_of_something_else_is_never_replaced(config: RunConfig) -> None:
    path = Path(config.run.dir) / config.run.name
    path.mkdir(parents=True)
    (path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not the folder of a run, so it is not replaced"):
        run_folder.RunFolder.create(config, overwrite=True)
    assert (path / "thesis.txt").exists()


def test_a_folder_that_could_not_be_filled_is_taken_away(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", disk_full)
    folder = run_folder.RunFolder.create(config, overwrite=False)
    with pytest.raises(OSError, match="No space left"):
        folder.fill(config, [].append)
    assert not folder.path.exists()


def test_proxies_and_foreign_python_settings_stay_outside() -> None:
    base = {
        "PATH": "/bin",
        "HTTPS_PROXY": "http://proxy",
        "no_proxy": "x",
        "PYTHONHOME": "/elsewhere",
        "PYTHONPATH": "/own",
    }
    seen = local.environment(base, threads=3)
    assert seen["PATH"] == "/bin"
    assert seen["PYTHONPATH"] == "/own", "a user's own advantage, loss, grader or environment is found there"
    assert not {"HTTPS_PROXY", "no_proxy", "PYTHONHOME"} & seen.keys()
    assert seen["OMP_NUM_THREADS"] == "3"
