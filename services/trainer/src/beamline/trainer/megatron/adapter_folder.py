"""Adapters in a checkpoint: PEFT's format, written by rank 0 and read for whatever boxes a rank holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from beamline.protocol.adapter import Adapter
from beamline.runtime.adapter_files import PREFIX, AdapterTensor, factor, global_rank, write_adapters
from beamline.runtime.checkpoints import ADAPTER
from beamline.trainer.megatron.policy_files import PolicyFiles
from beamline.trainer.shards import Slot


@dataclass(frozen=True)
class AdapterFolder:
    """Implements `Folder`: in `adapter/`, without their scale once they are read."""

    adapters: Sequence[Adapter]
    """Of the whole model."""
    base: Path
    """Hugging Face directory of the model."""

    def write(self, exported: Iterable[tuple[str, Tensor]], checkpoint: Path) -> None:
        (checkpoint / ADAPTER).mkdir(parents=True, exist_ok=True)
        write_adapters(checkpoint / ADAPTER, self.adapters, self.base, (_on_host(*one) for one in exported))

    def open(self, checkpoint: Path) -> PolicyFiles:
        return _AdapterFiles(checkpoint / ADAPTER, global_rank(self.adapters))


class _AdapterFiles(PolicyFiles):
    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory, PREFIX)
        self._rank = rank

    def trained(self, slot: Slot, values: Tensor) -> Tensor:
        return values / factor(slot.name, self._rank, slot.shape)


def _on_host(name: str, tensor: Tensor) -> AdapterTensor:
    values, dtype = tensor.detach().cpu().contiguous(), str(tensor.dtype).removeprefix("torch.")
    return AdapterTensor(name, dtype, (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy())
