"""The tensors of a Hugging Face directory against the checksums that an engine verified."""

from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from beamline.weights.manifest import Piece, TensorEntry, WeightManifest


def differing_weights(model: Path, manifest: WeightManifest) -> list[str]:
    """Names of tensors whose bytes, type or shape differ, or that one side lacks; in the model's order."""
    verified = {entry.name: entry for entry in manifest.tensors}
    paths = {name: path for path in sorted(model.glob("*.safetensors")) for name in _names(path)}
    return [
        name
        for name in {**paths, **verified}
        if name not in paths or name not in verified or not _is_same(paths[name], verified[name])
    ]


def has_checksums(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether a tensor has the type, the shape and in every piece the bytes that were verified."""
    if (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        return False
    return all(_checksum(tensor[_inside(piece)]) == piece.checksum for piece in entry.pieces)


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _is_same(path: Path, entry: TensorEntry) -> bool:
    with safe_open(path, framework="pt") as file:
        return has_checksums(file.get_tensor(entry.name), entry)


def _inside(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in piece.box)


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
