"""Where each parameter's state lies in the buckets. Torch-free.

A bucket is three sections of equal length: main weights, first moments, second moments. A piece is a run of elements of
one flattened parameter, at the same position of all three sections. A parameter that does not fit goes on in the next
bucket.

Vectorised code treats the last elements of a tensor, those that do not fill a vector, differently, with other
rounding. So a cut lies at a multiple of `CUT` elements of the parameter, a cache line, which every vector length
divides: then a parameter updated in pieces is bit for bit the parameter updated in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 4096
"""Bytes. Of offsets and lengths on disk, as O_DIRECT wants them."""
ELEMENT_BYTES = 4
CUT = 64 // ELEMENT_BYTES
UNIT = ALIGNMENT // ELEMENT_BYTES
"""A section's length is a multiple of it."""
SECTIONS = ("main", "exp_avg", "exp_avg_sq")
MIN_BUCKET_BYTES = len(SECTIONS) * ALIGNMENT
GENERATIONS = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` elements of a parameter at `position` of each section of a bucket."""

    bucket: int
    position: int
    length: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A parameter's shape and its pieces in the order of its elements."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def starts(self) -> list[int]:
        """The first element of each piece."""
        return list(accumulate((piece.length for piece in self.pieces), initial=0))[: len(self.pieces)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes of the state file from `offset`, and the hexadecimal XXH3 of 64 bits over them."""

    offset: int
    num_bytes: int
    xxh3_64: str

    @property
    def section_length(self) -> int:
        """Elements of each of its sections."""
        return self.num_bytes // (len(SECTIONS) * ELEMENT_BYTES)


class Packer:
    """Gives parameters their places, one after the other; `capacity` is the elements of a section of a full bucket."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bucket = 0
        self.position = 0

    def pieces(self, num_elements: int) -> Sequence[Piece]:
        """Where a parameter of so many elements goes. Opens as many buckets as it needs."""
        pieces: list[Piece] = []
        while num_elements:
            if self.position == self.capacity:
                self.bucket, self.position = self.bucket + 1, 0
            length = min(num_elements, self.capacity - self.position)
            pieces.append(Piece(self.bucket, self.position, length))
            self.position += round_up(length, CUT)
            num_elements -= length
        return pieces


def capacity_of(bucket_bytes: int) -> int:
    """Elements of a section of a bucket of at most so many bytes."""
    if bucket_bytes < MIN_BUCKET_BYTES:
        raise ValueError(f"bucket_bytes={bucket_bytes} is below {MIN_BUCKET_BYTES}: give at least that")
    return bucket_bytes // (len(SECTIONS) * ELEMENT_BYTES) // UNIT * UNIT


def bytes_needed(num_params: int) -> int:
    """What two generations of so many parameters take on disk, up to padding (a cache line a parameter)."""
    return GENERATIONS * len(SECTIONS) * ELEMENT_BYTES * round_up(num_params, UNIT)


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
