"""The weights of a Hugging Face directory, read for whatever boxes a rank holds: of each file those bytes alone."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from beamline.protocol.errors import WeightError
from beamline.trainer.megatron.state_slots import Part
from beamline.trainer.shards import Slot


class PolicyFiles:
    """Safetensors files of a directory. Raises WeightError for one that cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    names = file.keys()
                    self._tensors |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in names}
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
                    slot.parameter.data[rows].copy_(file.get_slice(slot.name)[box])
