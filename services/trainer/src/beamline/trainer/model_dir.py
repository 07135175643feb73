"""What a model directory must hold, looked at before anything heavy is imported."""

from pathlib import Path

from beamline.protocol.errors import ConfigError


def check_model_dir(path: Path) -> None:
    """Raises ConfigError naming the first file that is missing."""
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"model.path={str(path)!r} has no {name}: point it at a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.path={str(path)!r} has no *.safetensors file: save the weights in that format")
