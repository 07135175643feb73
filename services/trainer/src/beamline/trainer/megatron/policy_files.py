"""A policy's tensors in a directory: written by rank 0, read for whatever boxes a rank holds, those bytes alone."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from beamline.protocol.errors import WeightError
from beamline.runtime.checkpoints import POLICY
from beamline.trainer.megatron.state_slots import Part
from beamline.trainer.shards import Slot
from beamline.trainer.weights_out import write_safetensors


class PolicyFiles:
    """Safetensors files of a directory. Raises WeightError for one that cannot be read.

    Args:
        prefix: before the name of every tensor.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self._directory = directory
        self._prefix = prefix
        self._tensors: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    names = file.keys()
                    self._tensors |= {
                        name.removeprefix(prefix): (path, tuple(file.get_slice(name).get_shape())) for name in names
                    }
            except (OSError, SafetensorError) as error:
                raise WeightError(f"{path} cannot be read: {error}; use another checkpoint") from error

    def check(self, slots: Iterable[Slot]) -> None:
        """Raises WeightError, naming the first tensor that is missing or of another shape."""
        for slot in slots:
            if slot.name not in self._tensors:
                raise WeightError(f"{self._directory} has no tensor {slot.name}: it is of another model")
            _, shape = self._tensors[slot.name]
            if shape != tuple(slot.shape):
                raise WeightError(
                    f"tensor {slot.name} in {self._directory} has shape {list(shape)}, expected {list(slot.shape)}: "
                    "it is of another model"
                )

    def load(self, slots: Iterable[Slot]) -> None:
        """Copy into the parameters what `check` has seen."""
        by_file: dict[Path, list[Slot]] = {}
        for slot in slots:
            by_file.setdefault(self._tensors[slot.name][0], []).append(slot)
        for path, inside in by_file.items():
            with safe_open(path, "pt") as file, torch.no_grad():
                for slot in inside:
                    part = Part.of(slot)
                    box = tuple(slice(start, stop) for start, stop in part.box)
                    rows = slice(part.first_row, part.first_row + part.size[0])
                    values = file.get_slice(self._prefix + slot.name)[box]
                    slot.parameter.data[rows].copy_(self.trained(slot, values))

    def trained(self, slot: Slot, values: Tensor) -> Tensor:
        """What was stored, as it is trained."""
        return values


class Folder(Protocol):
    """Where and how a policy lies in a checkpoint."""

    def write(self, exported: Iterable[tuple[str, Tensor]], checkpoint: Path) -> None:
        """Write tensors into their folder of a checkpoint, which is made if it is not there; rank 0 alone does.

        Raises OSError or SafetensorError where the disk fails, after it has gone through all tensors.
        """
        ...

    def open(self, checkpoint: Path) -> PolicyFiles:
        """Raises WeightError for a file that cannot be read."""
        ...


class PolicyFolder:
    """Implements `Folder`: all weights under their Hugging Face names, in `policy/`."""

    def write(self, exported: Iterable[tuple[str, Tensor]], checkpoint: Path) -> None:
        (checkpoint / POLICY).mkdir(parents=True, exist_ok=True)
        write_safetensors(exported, checkpoint / POLICY)

    def open(self, checkpoint: Path) -> PolicyFiles:
        return PolicyFiles(checkpoint / POLICY)
