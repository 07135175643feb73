"""The tensors of a Hugging Face directory against the checksums that an engine verified."""

from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from beamline.weights.manifest import WeightManifest


def differing_weights(model: Path, manifest: WeightManifest) -> list[str]:
    """Names of tensors whose bytes, type or shape differ, or that one side lacks; in the model's order."""
    expected = {entry.name: (entry.dtype, entry.shape, entry.checksum) for entry in manifest.tensors}
    found = dict(_entry(path, name) for path in sorted(model.glob("*.safetensors")) for name in _names(path))
    return [name for name in {**found, **expected} if found.get(name) != expected.get(name)]


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _entry(path: Path, name: str) -> tuple[str, tuple[str, list[int], str]]:
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name).contiguous()
    content = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    return name, (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), xxhash.xxh3_64_hexdigest(content))
