"""What a Hugging Face directory holds beside weights: configuration, tokenizer, and how to generate."""

import json
import shutil
from pathlib import Path
from typing import Any, cast

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json")
GENERATION = "generation_config.json"
_TOKENS = ("eos", "pad", "bos")


def describe(model_dir: Path, policy: Path, dtype: str = "") -> None:
    """Copy all files of `model_dir` but its weights, and make them say what the policy is.

    generation_config.json, which a model may lack or have without them, names the tokens that end and fill a text.

    Args:
        dtype: in which the weights are written, for config.json to name it; empty where that is the model's own.
    """
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(path, policy / path.name)
    config = _read(policy / "config.json")
    if dtype:
        config.pop("torch_dtype", None)
        write_json(policy / "config.json", {**config, "dtype": dtype})
    generation = _read(policy / GENERATION)
    completed = {**_token_ids(policy, config), **{name: v for name, v in generation.items() if v is not None}}
    if completed != generation:
        write_json(policy / GENERATION, completed)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, for people."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _token_ids(policy: Path, config: dict[str, Any]) -> dict[str, Any]:
    """As the model's configuration has them, else the tokenizer's; a model without padding pads with its first end."""
    found = {f"{name}_token_id": config.get(f"{name}_token_id") for name in _TOKENS}
    named = _read(policy / "tokenizer_config.json")
    ids = {token["content"]: token["id"] for token in _read(policy / "tokenizer.json").get("added_tokens", [])}
    for name in _TOKENS:
        token: Any = named.get(f"{name}_token")
        text = cast("dict[str, Any]", token)["content"] if isinstance(token, dict) else token
        if found[f"{name}_token_id"] is None:
            found[f"{name}_token_id"] = ids.get(text)
    end = found["eos_token_id"]
    if found["pad_token_id"] is None:
        found["pad_token_id"] = end[0] if isinstance(end, list) else end
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _read(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
