"""Pages of this process's memory: given back to the machine, and counted where they are still there."""

import ctypes

import psutil

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
_PAGE_BYTES = 4096
_COUNTED_AT_ONCE = 1 << 18
"""Pages that one question to the kernel is about: a byte is needed for each."""


def resident_bytes() -> int:
    """Of this process, all in all."""
    return psutil.Process().memory_info().rss


def drop_pages(address: int, num_bytes: int) -> None:
    """Tell the kernel that the whole pages inside a range are not needed: they are gone, and read as zeros.

    Pages that are locked into memory stay, as `resident_bytes_in` will tell.
    """
    start, num_pages = _pages(address, num_bytes)
    if num_pages:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * _PAGE_BYTES), _MADV_DONTNEED)


def resident_bytes_in(address: int, num_bytes: int) -> int:
    """Bytes of the whole pages inside a range that are in memory. Raises OSError for a range that is not mapped."""
    start, num_pages = _pages(address, num_bytes)
    num_resident = 0
    for first in range(0, num_pages, _COUNTED_AT_ONCE):
        count = min(_COUNTED_AT_ONCE, num_pages - first)
        flags = (ctypes.c_ubyte * count)()
        if _libc.mincore(ctypes.c_void_p(start + first * _PAGE_BYTES), ctypes.c_size_t(count * _PAGE_BYTES), flags):
            raise OSError(ctypes.get_errno(), f"mincore of {count} pages failed")
        num_resident += sum(flag & 1 for flag in flags)
    return num_resident * _PAGE_BYTES


def give_back_heap() -> None:
    """Hand free memory of the C library's heap to the kernel."""
    _libc.malloc_trim(0)


def _pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Address of the first whole page inside a range, and how many there are."""
    start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    return start, max(0, (address + num_bytes - start) // _PAGE_BYTES)
