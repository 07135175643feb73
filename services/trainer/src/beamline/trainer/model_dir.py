"""What a model directory must hold, looked at before anything heavy is imported."""

import math
from pathlib import Path

from safetensors import safe_open

from beamline.protocol.errors import ConfigError


def check_model_dir(path: Path) -> None:
    """Raises ConfigError naming the first file that is missing."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"model.path={str(path)!r} has no {name}: point it at a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.path={str(path)!r} has no *.safetensors file: save the weights in that format")


def num_elements(path: Path) -> int:
    """Of all tensors of the directory's weights; no tensor is read."""
    return sum(math.prod(shape) for file in path.glob("*.safetensors") for shape in _shapes(file))


def _shapes(path: Path) -> list[list[int]]:
    with safe_open(path, framework="np") as file:
        return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  no mapping
