"""Optimizer state in a file: AdamW's float32 main weights and moments by parameter name, whatever kept them before.

`<stem>.state` is raw buckets (layout.py) of little-endian float32, `<stem>.json` says what is where (header.py). Any
part of any parameter can be read by itself, and every bucket it lies in is checked first.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xxhash

from beamline.diskoptim.buffers import Buffer
from beamline.diskoptim.errors import StateError, explained
from beamline.diskoptim.files import Io, choose_io, opened, read_exactly
from beamline.diskoptim.header import MEND, Header, check_length, header_path, state_path
from beamline.diskoptim.layout import (
    CUT,
    ELEMENT_BYTES,
    SECTIONS,
    UNIT,
    Bucket,
    Packer,
    Piece,
    Placement,
    capacity_of,
    round_up,
)

BUCKET_BYTES = 64 * 2**20
HASHED_AT_ONCE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class AdamState:
    """AdamW's state of one parameter: three tensors of one shape. Read as float32, given in any float type."""

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def fresh(cls, parameter: torch.Tensor) -> Self:
        """Before the first step: no moments, and no memory for them."""
        zeros = torch.zeros((), device=parameter.device).expand(parameter.shape)
        return cls(parameter.detach(), zeros, zeros)


class StateFile:
    """A complete state, opened to read. Checks the sum of every bucket once, when it is first touched."""

    def __init__(self, header: Header, folder: Path, stem: str) -> None:
        self.header = header
        self.folder = folder
        self.stem = stem
        self.path = state_path(folder, stem)
        self._checked: set[int] = set()

    @classmethod
    def open(cls, folder: Path | str, stem: str) -> Self:
        """Raises StateError where header or state are missing, damaged, truncated or foreign."""
        folder = Path(folder)
        header = Header.read(header_path(folder, stem))
        check_length(header, state_path(folder, stem))
        return cls(header, folder, stem)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that went into it."""
        return self.header.num_steps

    def names(self) -> list[str]:
        """Of the parameters, in the order in which they lie."""
        return list(self.header.parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter. Raises StateError for an unknown name."""
        return self._placement(name).shape

    def read(self, name: str, rows: slice | None = None) -> AdamState:
        """A parameter's state, or rows start:stop of its first dimension; on the CPU, in memory of its own."""
        return AdamState(*(self.read_section(name, section, rows) for section in range(len(SECTIONS))))

    def read_section(self, name: str, section: int, rows: slice | None = None) -> torch.Tensor:
        """The same of one of SECTIONS alone."""
        shape = self._placement(name).shape
        row_length, begin, end = 1, 0, int(np.prod(shape))
        if rows is not None:
            start, stop, _ = _steps_of_one(name, rows, shape)
            row_length = int(np.prod(shape[1:]))
            shape, begin, end = (max(stop - start, 0), *shape[1:]), start * row_length, max(stop, start) * row_length
        elements = np.empty(end - begin, np.float32)
        with opened(self.path, os.O_RDONLY) as file:
            self._read_elements(file, self._placement(name), section, begin, elements)
        return torch.from_numpy(elements).view(shape)

    def verify(self) -> None:
        """Checks every bucket anew. Raises StateError naming the first that is damaged."""
        self._checked.clear()
        check_length(self.header, self.path)
        with opened(self.path, os.O_RDONLY) as file:
            for index in range(len(self.header.buckets)):
                self._check(file, index)

    def _read_elements(self, file: int, place: Placement, section: int, begin: int, into: np.ndarray) -> None:
        end = begin + len(into)
        for start, piece in zip(place.starts, place.pieces, strict=True):
            low, high = max(begin, start), min(end, start + piece.length)
            if low >= high:
                continue
            self._check(file, piece.bucket)
            bucket = self.header.buckets[piece.bucket]
            element = section * bucket.section_length + piece.position + low - start
            view = memoryview(into[low - begin : high - begin]).cast("B")
            read_exactly(file, [view], bucket.offset + element * ELEMENT_BYTES)

    def _check(self, file: int, index: int) -> None:
        if index in self._checked:
            return
        bucket, hashed = self.header.buckets[index], xxhash.xxh3_64()
        block = memoryview(bytearray(min(HASHED_AT_ONCE, bucket.num_bytes)))
        for offset in range(0, bucket.num_bytes, HASHED_AT_ONCE):
            part = block[: min(HASHED_AT_ONCE, bucket.num_bytes - offset)]
            read_exactly(file, [part], bucket.offset + offset)
            hashed.update(part)
        check_sum(self, index, hashed.hexdigest())
        self._checked.add(index)

    def _placement(self, name: str) -> Placement:
        try:
            return self.header.parameters[name]
        except KeyError as error:
            raise StateError(f"{self.path} has no parameter {name!r}; it has {_some(self.names())}") from error


def check_sum(state: StateFile, index: int, found: str) -> None:
    """Raises StateError where a bucket's bytes are not those that were written."""
    bucket = state.header.buckets[index]
    if found != bucket.xxh3_64:
        inside = [n for n, place in state.header.parameters.items() if any(p.bucket == index for p in place.pieces)]
        raise StateError(
            f"{state.path} is damaged: bucket {index} ({bucket.num_bytes} bytes from {bucket.offset}, with "
            f"{_some(inside)}) has the sum {found}, and was written with {bucket.xxh3_64}; {MEND}"
        )


def write_state(
    folder: Path | str,
    stem: str,
    tensors: Iterable[tuple[str, AdamState]],
    num_steps: int,
    *,
    generation: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    io: Io = "auto",
) -> list[Path]:
    """Write a state file; the tensors are asked for one after the other. Returns the two paths, durably on disk.

    The header comes last: after any failure there is no header of that stem, and so no state. Raises DiskFull,
    DirectoryError; what the iterable raises goes through.
    """
    folder = Path(folder)
    path = state_path(folder, stem)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        header_path(folder, stem).unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # it may be a snapshot's by another name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        direct = os.O_DIRECT if choose_io(folder, io) == "direct" else 0
        with opened(path, flags | direct) as file:
            writer = _Writer(file, capacity_of(bucket_bytes))
            parameters = {name: writer.put(state) for name, state in tensors}
            writer.flush()
            os.fdatasync(file)
        header = Header(
            generation=generation, num_steps=num_steps, buckets=tuple(writer.buckets), parameters=parameters
        )
        return [path, header.write(folder, stem)]


class _Writer:
    """Fills buckets with parameters in the order in which they come, and writes each when it is full."""

    def __init__(self, file: int, capacity: int) -> None:
        self.buckets: list[Bucket] = []
        self._file = file
        self._packer = Packer(capacity)
        self._buffer = Buffer(capacity)
        self._filled = 0

    def put(self, state: AdamState) -> Placement:
        """Take a parameter's state in."""
        sections = [tensor.detach().reshape(-1) for tensor in (state.main, state.exp_avg, state.exp_avg_sq)]
        place = Placement(tuple(state.main.shape), tuple(self._packer.pieces(state.main.numel())))
        for start, piece in zip(place.starts, place.pieces, strict=True):
            if piece.bucket > len(self.buckets):
                self.flush()
            self._copy(sections, start, piece)
        return place

    def flush(self) -> None:
        """Write the bucket that is being filled, if there is one."""
        if not self._filled:
            return
        length = round_up(self._filled, UNIT)
        self._buffer.values[:, self._filled : length] = 0
        offset = self.buckets[-1].offset + self.buckets[-1].num_bytes if self.buckets else 0
        bucket = Bucket(offset, length * len(SECTIONS) * ELEMENT_BYTES, self._buffer.checksum(length))
        self._buffer.write(self._file, bucket)
        self.buckets.append(bucket)
        self._filled = 0

    def _copy(self, sections: Sequence[torch.Tensor], start: int, piece: Piece) -> None:
        end = piece.position + piece.length
        for row, section in zip(self._buffer.values, sections, strict=True):
            row[piece.position : end].copy_(section[start : start + piece.length])
        self._filled = round_up(end, CUT)
        self._buffer.values[:, end : self._filled] = 0


def with_sums(header: Header, sums: Sequence[str]) -> Header:
    """The next generation of the same layout, one step on."""
    buckets = tuple(replace(bucket, xxh3_64=found) for bucket, found in zip(header.buckets, sums, strict=True))
    return replace(header, generation=header.generation + 1, num_steps=header.num_steps + 1, buckets=buckets)


def _steps_of_one(name: str, rows: slice, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if not shape or rows.step not in (None, 1):
        raise ValueError(f"rows={rows} of {name!r}, whose shape is {list(shape)}: give start and stop of a dimension")
    return rows.indices(shape[0])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
