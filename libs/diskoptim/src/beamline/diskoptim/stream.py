"""Buckets through three buffers: while one is updated, the one after it is read and the one before it is written."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from beamline.diskoptim.buffers import Buffer
from beamline.diskoptim.errors import StateError
from beamline.diskoptim.files import ChosenIo
from beamline.diskoptim.header import MEND
from beamline.diskoptim.state_file import StateFile, check_sum

NUM_BUFFERS = 3

Update = Callable[[int, Buffer], None]
"""Changes bucket `index`, which is in the buffer, in place."""


class Stream:
    """One pass over a state file into another of the same layout. Reading begins as soon as it is entered."""

    def __init__(self, source: StateFile, target: Path, buffers: Sequence[Buffer], io: ChosenIo) -> None:
        self._source = source
        self._target = target
        self._buffers = buffers
        self._direct = os.O_DIRECT if io == "direct" else 0
        self._buckets = source.header.buckets
        self._reads: list[Future[None]] = []
        self._writes: list[Future[None]] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._old = os.open(self._source.path, os.O_RDONLY | self._direct)
            stack.callback(os.close, self._old)
            self._new = os.open(self._target, os.O_WRONLY | self._direct)
            stack.callback(os.close, self._new)
            self._reader = stack.enter_context(ThreadPoolExecutor(1, "optimizer-reads"))
            self._writer = stack.enter_context(ThreadPoolExecutor(1, "optimizer-writes"))
            stack.callback(self._give_up)
            for index in range(min(NUM_BUFFERS, len(self._buckets))):
                self._reads.append(self._reader.submit(self._read, index))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, update: Update) -> list[str]:
        """Every bucket in turn: check, update, sum. Returns the sums of what is on the disk when this returns.

        Raises StateError for a bucket that is damaged, OSError from reading and writing.
        """
        sums: list[str] = []
        for index, bucket in enumerate(self._buckets):
            self._reads[index].result()
            buffer = self._buffer(index)
            check_sum(self._source, index, buffer.checksum(bucket.section_length))
            update(index, buffer)
            sums.append(buffer.checksum(bucket.section_length))
            self._writes.append(self._writer.submit(buffer.write, self._new, bucket))
            if index + NUM_BUFFERS < len(self._buckets):
                self._reads.append(self._reader.submit(self._read_after_write, index + NUM_BUFFERS))
        for written in self._writes:
            written.result()
        os.fdatasync(self._new)
        return sums

    def _read_after_write(self, index: int) -> None:
        """Into the buffer of an earlier bucket, when that is on its way to the disk no more."""
        self._writes[index - NUM_BUFFERS].result()
        self._read(index)

    def _read(self, index: int) -> None:
        try:
            self._buffer(index).read(self._old, self._buckets[index])
        except EOFError as error:
            raise StateError(f"{self._source.path} was truncated in bucket {index}: {error}; {MEND}") from error

    def _buffer(self, index: int) -> Buffer:
        return self._buffers[index % NUM_BUFFERS]

    def _give_up(self) -> None:
        """Of transfers that have not begun; those that have are waited for by the executors."""
        for transfer in (*self._reads, *self._writes):
            transfer.cancel()
