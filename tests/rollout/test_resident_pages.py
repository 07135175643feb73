"""Memory that is in a process is counted page by page."""

import ctypes
import mmap

from beamline.rollout.resident_pages import drop_pages, resident_bytes_in

PAGE_BYTES = 4096


def test_pages_are_counted_as_they_are_touched_and_dropped() -> None:
    memory = mmap.mmap(-1, 300_000 * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert resident_bytes_in(address, len(memory)) == 0
    for page in (0, 7, 262_144, 299_999):
        memory[page * PAGE_BYTES] = 1
    assert resident_bytes_in(address, len(memory)) == 4 * PAGE_BYTES
    assert resident_bytes_in(address + 1, len(memory) - 1) == 3 * PAGE_BYTES, "only whole pages count"
    drop_pages(address, 8 * PAGE_BYTES + 5)
    assert resident_bytes_in(address, len(memory)) == 2 * PAGE_BYTES
    assert memory[7 * PAGE_BYTES] == 0
