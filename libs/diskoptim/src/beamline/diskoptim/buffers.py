"""A bucket in memory: three sections of float32 on aligned memory that both the disk and torch work on."""

import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from beamline.diskoptim.files import read_exactly, write_exactly
from beamline.diskoptim.layout import ELEMENT_BYTES, SECTIONS, Bucket


class Buffer:
    """Room for a bucket with sections of `capacity` elements. `values` is [section, capacity], float32."""

    def __init__(self, capacity: int) -> None:
        memory = mmap.mmap(-1, max(capacity, 1) * len(SECTIONS) * ELEMENT_BYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin at every transfer
        self._sections = np.frombuffer(memory, np.float32).reshape(len(SECTIONS), -1)
        self.values = torch.from_numpy(self._sections)

    def views(self, section_length: int) -> Sequence[memoryview]:
        """The bytes of the sections' beginnings."""
        return [memoryview(section[:section_length]).cast("B") for section in self._sections]

    def read(self, file: int, bucket: Bucket) -> None:
        """Fill it from a state file."""
        read_exactly(file, self.views(bucket.section_length), bucket.offset)

    def write(self, file: int, bucket: Bucket) -> None:
        """To a state file."""
        write_exactly(file, self.views(bucket.section_length), bucket.offset)

    def checksum(self, section_length: int) -> str:
        """As a bucket states it."""
        hashed = xxhash.xxh3_64()
        for view in self.views(section_length):
            hashed.update(view)
        return hashed.hexdigest()

    def pin(self) -> None:
        """Make it memory that a GPU reads and writes by itself."""
        if not self.values.is_pinned():
            runtime = torch.cuda.cudart()
            assert runtime is not None
            address = self.values.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, self.values.nbytes, 0)))
            weakref.finalize(self, runtime.cudaHostUnregister, address)  # before the memory goes
