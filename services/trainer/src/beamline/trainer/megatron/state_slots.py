"""`rank-N.slots.json`: of which boxes of which Hugging Face tensors the parameters of a rank's state file are made.

By it any layout can read the state of any other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from beamline.protocol.errors import WeightError
from beamline.trainer.shards import Slot
from beamline.weights.tensors import Box

SUFFIX = ".slots.json"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a tensor, which is some rows of a parameter."""

    tensor: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Where the box begins, in every dimension."""
    size: tuple[int, ...]
    """Of the box, in every dimension."""
    first_row: int
    """Of the parameter; as many rows follow as the box has."""

    @property
    def box(self) -> Box:
        return tuple((start, start + size) for start, size in zip(self.start, self.size, strict=True))

    @classmethod
    def of(cls, slot: Slot) -> "Part":
        first = 0 if slot.rows is None else slot.rows.start
        num_rows = len(slot.parameter) if slot.rows is None else slot.rows.stop - first
        size = (num_rows, *slot.parameter.shape[1:])
        return cls(tensor=slot.name, shape=slot.shape, start=slot.start, size=size, first_row=first)


class StateSlots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    format: Literal["beamline-state-slots/1"] = "beamline-state-slots/1"
    parameters: dict[str, list[Part]]
    """By the parameter's name in the state file."""


def write_slots(folder: Path, stem: str, slots: Mapping[str, Sequence[Slot]]) -> None:
    """Write `<stem>.slots.json`."""
    content = StateSlots(parameters={name: [Part.of(slot) for slot in found] for name, found in slots.items()})
    (folder / f"{stem}{SUFFIX}").write_bytes(msgspec.json.encode(content))


def read_slots(path: Path) -> StateSlots:
    """Raises WeightError for a file that is not one of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StateSlots)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightError(f"{path} does not say what the optimizer's state is of: {error}") from error
