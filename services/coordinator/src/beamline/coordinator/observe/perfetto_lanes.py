"""Which slices may lie on one track: a viewer takes the slice that ends next to be the innermost one."""

from enum import Enum


class Overlap(Enum):
    """What may lie within a slice on the same lane."""

    NESTED = "what ends before it"
    NONE = "nothing"


class Lanes:
    """Lanes of slices that come in the order of their start."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._open: list[list[int]] = []
        """By lane, ends of the slices that have not ended, the innermost last."""

    def place(self, start_ns: int, end_ns: int) -> int:
        """The first lane that takes the slice."""
        for number, ends in enumerate(self._open):
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or (self._overlap is Overlap.NESTED and end_ns <= ends[-1]):
                ends.append(end_ns)
                return number
        self._open.append([end_ns])
        return len(self._open) - 1
