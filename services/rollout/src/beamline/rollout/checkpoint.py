"""What a Hugging Face directory says about a model, read without loading it: tensors, tokenizer, end tokens."""

import json
from pathlib import Path
from typing import Any

from beamline.models import weight_files
from beamline.models.routing import RoutingShape
from beamline.protocol.errors import ConfigError


def check_servable(model_path: Path, max_model_tokens: int) -> None:
    """Raises ConfigError where an engine could not serve sequences of that length from the directory."""
    limit = read_config(model_path).get("max_position_embeddings")
    if limit is not None and max_model_tokens > limit:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.sampling.max_response_tokens = {max_model_tokens} exceeds the model's "
            f"max_position_embeddings = {limit}: lower one of them"
        )
    tokenizer_file(model_path)
    tensor_shapes(model_path)
    end_tokens(model_path)


def read_config(model_path: Path) -> dict[str, Any]:
    """config.json. Raises ConfigError where the directory is not a model's."""
    return _read_json(model_path, "config.json", "point model.path at a Hugging Face model directory")


def tokenizer_file(model_path: Path) -> Path:
    """tokenizer.json. Raises ConfigError where it is missing."""
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"model.path={str(model_path)!r} has no tokenizer.json: copy the model's tokenizer files into it"
        )
    return path


def tensor_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint. Raises ConfigError where there is none."""
    shapes = weight_files.tensor_shapes(model_path)
    if not shapes:
        raise ConfigError(f"model.path={str(model_path)!r} has no *.safetensors file: save the weights in that format")
    return shapes


def end_tokens(model_path: Path) -> list[int]:
    """Token ids that end a response: those of generation_config.json, else of config.json.

    Raises ConfigError where neither names one: responses would never stop.
    """
    for name in ("generation_config.json", "config.json"):
        if (model_path / name).is_file():
            eos = _read_json(model_path, name, "mend the file").get("eos_token_id")
            if eos is not None:
                return list(eos) if isinstance(eos, list) else [eos]
    raise ConfigError(f"model.path={str(model_path)!r} has no eos_token_id: add it to generation_config.json")


def routing_shape(model_path: Path) -> RoutingShape | None:
    """The model's experts by layer; None for a model without any. Raises ConfigError as `read_config`."""
    shape = RoutingShape.of_config(read_config(model_path))
    return shape if shape.sparse_layers else None


def _read_json(model_path: Path, name: str, mend: str) -> dict[str, Any]:
    try:
        return json.loads((model_path / name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={str(model_path)!r} has no readable {name} ({error}): {mend}") from error
