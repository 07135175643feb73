"""The optimizer state of a checkpoint, read for whatever parameters a rank has, in whatever layout it was saved.

Legend: a piece is a box of a Hugging Face tensor in some rank's state file.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from beamline.diskoptim.state_file import AdamState, StateFile
from beamline.protocol.errors import WeightError
from beamline.trainer.megatron.state_slots import SUFFIX, Part, read_slots
from beamline.trainer.megatron.states.errors import state_errors
from beamline.trainer.shards import Slot
from beamline.weights.tensors import common


@dataclass(frozen=True)
class _Piece:
    file: StateFile
    parameter: str
    part: Part

    def copy(self, wanted: Part, into: AdamState) -> None:
        """Copy what of it lies in `wanted`, if they meet; only its rows are read."""
        if not common(self.part.box, wanted.box):
            return
        edges = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.part.box, wanted.box, strict=True)]
        rows, *rest = _inside(edges, self.part.start)
        offset = self.part.first_row
        with state_errors():
            found = self.file.read(self.parameter, slice(rows.start + offset, rows.stop + offset))
        target = _inside(edges, wanted.start)
        for values, column in (
            (found.main, into.main),
            (found.exp_avg, into.exp_avg),
            (found.exp_avg_sq, into.exp_avg_sq),
        ):
            column[target].copy_(values[(slice(None), *rest)])


class StateSource:
    """State files of all ranks of a checkpoint.

    Raises WeightError, naming what is missing, damaged or of another model.
    """

    def __init__(self, folder: Path) -> None:
        stems = sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}"))
        if not stems:
            raise WeightError(
                f"{folder} has no rank-00000{SUFFIX}: the checkpoint has no optimizer state to go on with"
            )
        self._folder = folder
        self._pieces: dict[str, list[_Piece]] = {}
        steps = dict[str, int]()
        for stem in stems:
            with state_errors():
                file = StateFile.open(folder, stem)
            steps[stem] = file.num_steps
            for parameter, parts in read_slots(folder / f"{stem}{SUFFIX}").parameters.items():
                for part in parts:
                    self._add(_Piece(file, parameter, part))
        if len(set(steps.values())) > 1:
            raise WeightError(f"optimizer states in {folder} have taken different numbers of steps: {steps}")
        self.num_steps = steps[stems[0]]

    def _add(self, piece: _Piece) -> None:
        """Tensor-parallel ranks may hold the same box: the first one's is read."""
        pieces = self._pieces.setdefault(piece.part.tensor, [])
        if not any((other.part.start, other.part.size) == (piece.part.start, piece.part.size) for other in pieces):
            pieces.append(piece)

    def check(self, slots: Iterable[Slot]) -> None:
        """Raises WeightError, naming the first tensor that is missing, incomplete or of another shape."""
        for slot in slots:
            self._check(Part.of(slot))

    def gather(self, parameter: Tensor, slots: Sequence[Slot]) -> AdamState:
        """State of a parameter that consists of such boxes, which `check` has seen; on the CPU."""
        state = AdamState(*(torch.empty(parameter.shape, dtype=torch.float32) for _ in range(3)))
        for wanted in map(Part.of, slots):
            rows = slice(wanted.first_row, wanted.first_row + wanted.size[0])
            into = AdamState(state.main[rows], state.exp_avg[rows], state.exp_avg_sq[rows])
            for piece in self._pieces[wanted.tensor]:
                piece.copy(wanted, into)
        return state

    def _check(self, wanted: Part) -> None:
        pieces = self._pieces.get(wanted.tensor, [])
        if not pieces:
            raise WeightError(f"{self._folder} has no optimizer state of {wanted.tensor}: it is of another model")
        shape = pieces[0].part.shape
        if shape != wanted.shape:
            raise WeightError(
                f"optimizer state of {wanted.tensor} in {self._folder} has shape {list(shape)}, expected "
                f"{list(wanted.shape)}: it is of another model"
            )
        there = sum(common(piece.part.box, wanted.box) for piece in pieces)
        if there != math.prod(wanted.size):
            raise WeightError(
                f"optimizer state of {wanted.tensor} in {self._folder} has {there} of {math.prod(wanted.size)} elements"
                f" of its box at {list(wanted.start)}: files of some ranks are missing, or of another save"
            )


def _inside(edges: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - begin, stop - begin) for (first, stop), begin in zip(edges, origin, strict=True))
