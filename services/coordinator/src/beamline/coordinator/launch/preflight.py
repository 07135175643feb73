"""What is looked at before anything starts. A refusal is a ConfigError that names the thing, the value and the mend."""

import json
import socket
from itertools import islice
from pathlib import Path
from typing import Any

from beamline.coordinator.launch.adapters import ASSET, check_adapters
from beamline.coordinator.launch.own_code import check_own_code
from beamline.coordinator.loggers import check_loggers
from beamline.models import tiny
from beamline.models.chat import ChatTokenizer
from beamline.models.datasets import read_rows
from beamline.protocol.config import DataSection, RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.layout import check_layout

CHAINED_SUMS = "task:chained-sums"
ARCHITECTURES = ("BeamForCausalLM", "Qwen3MoeForCausalLM")
MAX_CHECKED_ROWS = 20_000
"""Of a data set; they are read in a second. `beamline data check` reads all."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check(config: RunConfig) -> None:
    """Raises ConfigError for a model or data that a run with this configuration could not use."""
    check_model(config)
    check_data(config.data)
    if not config.bus.url:
        check_port("bus.port", config.bus.port)
    check_port("telemetry.prometheus_port", config.telemetry.prometheus_port)
    check_loggers(config.run.loggers)
    check_own_code(config)


def check_port(key: str, port: int) -> None:
    """A port of this host that the run serves at is free; 0 is none, or any."""
    if not port:
        return
    try:
        with socket.create_server(("127.0.0.1", port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}={port} cannot be had: {error.strerror}; end what uses it, or leave {key} out"
        ) from None


def check_model(config: RunConfig) -> None:
    """The model's directory, or the name of a model that is made."""
    path = config.model.path
    if not path:
        raise ConfigError("model.path is empty: give a Hugging Face directory, or asset:tiny-beam")
    if path.startswith(ASSET):
        if (name := path.removeprefix(ASSET)) not in tiny.SPECS:
            known = ", ".join(ASSET + name for name in tiny.SPECS)
            raise ConfigError(f"model.path={path}: no model is called {name!r}; use {known}, or a directory's path")
        check_layout(config, tiny.SPECS[name].config())
        check_adapters(config)
        return
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"model.path={path} is not a directory: give that of a Hugging Face directory (MODEL_PATH)")
    description = _read_description(directory)
    _check_architecture(directory, description)
    _check_length(config, directory, description)
    check_layout(config, description)
    _check_weights(directory)
    check_adapters(config)
    check_tokenizer(config, directory, int(description.get("vocab_size", 0)))


def check_tokenizer(config: RunConfig, directory: Path, vocab_size: int) -> None:
    """The tokenizer loads, fits the model, and its template takes the recipe's arguments."""
    try:
        tokenizer = ChatTokenizer.load(directory)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from None
    if vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens and config.json vocab_size={vocab_size}: "
            "the tokenizer belongs to another model"
        )
    arguments = config.data.chat_template_kwargs
    try:
        tokenizer.render([{"role": "user", "content": "1+1"}], **arguments)
    except ValueError as error:
        raise ConfigError(f"data.chat_template_kwargs={arguments}: the model's chat template says: {error}") from None


def check_data(data: DataSection) -> None:
    """The training prompts and every evaluation set can be read."""
    if not data.train:
        raise ConfigError(f"data.train is empty: give a parquet file of prompts, or {CHAINED_SUMS}")
    check_prompts("data.train", data.train)
    for index, evaluation in enumerate(data.evals):
        check_prompts(f"data.evals[{index}].path", evaluation.path)
    names = [evaluation.name for evaluation in data.evals if evaluation.name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"data.evals: {names.count(name)} sets are called {name!r}: give each a name of its own")


def check_prompts(key: str, path: str) -> None:
    """One parquet file, by its columns and its first `MAX_CHECKED_ROWS` rows; or a task that generates its problems."""
    if path == CHAINED_SUMS:
        return
    if path.startswith("task:"):
        raise ConfigError(f"{key}={path}: no such task; the only one is {CHAINED_SUMS}")
    if not Path(path).is_file():
        raise ConfigError(
            f"{key}={path} is not a file: prepare it with `beamline data prepare NAME --from FILE`, or give its path"
        )
    try:
        num_rows = sum(1 for _ in islice(read_rows(path), MAX_CHECKED_ROWS))
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; `beamline data check {path}` says all that is wrong with it") from None
    if not num_rows:
        raise ConfigError(f"{key}={path} has no rows: give a file with at least one prompt")


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model directory {directory} has no config.json: give a Hugging Face directory") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; save the model again") from None
    if not isinstance(description, dict):
        raise ConfigError(f"{path} is a {type(description).__name__}, expected an object: save the model again")
    return description


def _check_architecture(directory: Path, description: dict[str, Any]) -> None:
    found = description.get("architectures") or ["none"]
    if found[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{directory}/config.json: architecture {found[0]} is not supported: use one of {', '.join(ARCHITECTURES)}"
        )


def _check_length(config: RunConfig, directory: Path, description: dict[str, Any]) -> None:
    limit = int(description.get("max_position_embeddings", 0))
    if limit < config.max_model_tokens:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} plus the longest "
            f"max_response_tokens={config.max_model_tokens - config.data.max_prompt_tokens} exceed the model's "
            f"max_position_embeddings={limit} ({directory}/config.json): lower one of them"
        )


def _check_weights(directory: Path) -> None:
    single, index = (directory / name for name in _WEIGHTS)
    if single.is_file():
        return
    if not index.is_file():
        raise ConfigError(f"model directory {directory} has neither {' nor '.join(_WEIGHTS)}: save the model's weights")
    shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        raise ConfigError(f"model directory {directory} lacks {missing[0]}, which {index.name} names: copy all shards")
