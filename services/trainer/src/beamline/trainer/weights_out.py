"""Exported tensors as safetensors files, for a checkpoint."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 4 * 1024**3

type Exported = Iterable[tuple[str, torch.Tensor]]


def write_safetensors(tensors: Exported, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or numbered shards of at most `shard_bytes` with their index.

    One shard's tensors are held at a time.
    """
    shards: list[list[str]] = []
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        save_file(shard, directory / f"shard-{number}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
    if len(shards) == 1:
        (directory / "shard-0.safetensors").rename(directory / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    for number, name in enumerate(names):
        (directory / f"shard-{number}.safetensors").rename(directory / name)
    total = sum((directory / name).stat().st_size for name in names)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Exported, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        # The export's tensors may share memory with the model or with each other; a file needs its own.
        shard[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    if shard:
        yield shard
