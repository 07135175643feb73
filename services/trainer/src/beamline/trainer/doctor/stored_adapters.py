"""A checkpoint's adapters: compared with what an engine verified, and read wrongly on purpose."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from beamline.protocol.adapter import B
from beamline.runtime.adapter_files import AdapterFiles
from beamline.trainer.doctor.stored_weights import has_checksums
from beamline.trainer.shards import Slot
from beamline.weights.manifest import TensorEntry, WeightManifest

type Slots = Mapping[str, Sequence[Slot]]
"""Of a model's adapters, by the parameter's name."""


def differing_adapters(directory: Path, names: Collection[str], manifest: WeightManifest) -> list[str]:
    """As `differing_weights`.

    Args:
        names: of all tensors of the run's adapters.
    """
    files, verified = AdapterFiles(directory), {entry.name: entry for entry in manifest.tensors}
    return [
        name
        for name in {**dict.fromkeys(names), **verified}
        if name not in names or name not in verified or not _is_same(files, verified[name])
    ]


@contextmanager
def experts_scaled(slots: Slots, factor: float) -> Iterator[None]:
    """Inside, what the experts' adapters add is multiplied by `factor`."""
    found: list[Tensor] = [
        slot.parameter.data for slot in _each(slots) if ".experts." in slot.name and f".{B}." in slot.name
    ]
    matrices = {tensor.data_ptr(): tensor for tensor in found}.values()
    right = [matrix.clone() for matrix in matrices]
    for matrix in matrices:
        matrix.mul_(factor)
    try:
        yield
    finally:
        for matrix, values in zip(matrices, right, strict=True):
            matrix.copy_(values)


def _each(slots: Slots) -> Iterator[Slot]:
    return (slot for found in slots.values() for slot in found)


def _is_same(files: AdapterFiles, entry: TensorEntry) -> bool:
    """By the values in the type in which they travelled."""
    return has_checksums(torch.from_numpy(files.read(entry.name)).to(getattr(torch, entry.dtype)), entry)
