"""Exported tensors as safetensors files, for a checkpoint."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from beamline.diskoptim.errors import DiskOptimError
from beamline.protocol.errors import WeightError

SHARD_BYTES = 4 * 1024**3
DISK_ERRORS = (OSError, SafetensorError, DiskOptimError, WeightError)
"""What writing a checkpoint may raise because of where it is written."""

type Exported = Iterable[tuple[str, torch.Tensor]]


def write_safetensors(tensors: Exported, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or numbered shards of at most `shard_bytes` with their index.

    One shard's tensors are held at a time. Raises OSError or SafetensorError where the disk fails, after it has gone
    through the rest of the tensors: other ranks may take part in making them.
    """
    rest = iter(tensors)
    try:
        shards: list[list[str]] = []
        for number, shard in enumerate(_shards(rest, shard_bytes)):
            save_file(shard, directory / f"shard-{number}.safetensors", metadata={"format": "pt"})
            shards.append(list(shard))
    finally:
        for _ in rest:
            pass
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


def _shards(tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
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
