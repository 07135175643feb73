"""Whether two Hugging Face directories are of one model: by its configuration, whatever the weights' values or type."""

import json
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from beamline.protocol.errors import ConfigError

_NOT_THE_MODEL = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""What a configuration says beside the model: it changes from one export to the next."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint remembers of the model that it is of."""

    architecture: str
    config_xxh3_64: str
    """Of config.json without what says nothing about the model, keys sorted."""

    @classmethod
    def of(cls, model_dir: Path) -> "ModelIdentity":
        """Raises ConfigError for a directory without a readable config.json."""
        config = _config(model_dir)
        canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
        architectures = config.get("architectures") or [config.get("model_type", "")]
        return cls(architecture=str(architectures[0]), config_xxh3_64=xxhash.xxh3_64_hexdigest(canonical.encode()))


def first_difference(model_dir: Path, other: Path) -> str:
    """The first setting in which two models differ, as "hidden_size is 64, not 128"; empty where they are one."""
    config, others = _config(model_dir), _config(other)
    for name in sorted(config.keys() | others.keys()):
        if config.get(name) != others.get(name):
            return f"{name} is {config.get(name)!r}, not {others.get(name)!r}"
    return ""


def _config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no readable configuration of a model: {error}") from error
    return {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
