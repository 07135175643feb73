"""A GPU through CUDA's driver: memory and events that processes share by handle.

Only this file imports the driver's bindings. torch has no part in it: what it shares between processes are pickles.
"""

import contextlib
import ctypes
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from beamline.protocol.errors import ConfigError, WeightError

HOST_PART_BYTES = 16 << 20
"""Copied to main memory in one go."""

HANDLE_BYTES = 64
"""Of memory and of an event."""

_LEGACY_STREAM = 0
_own_memory: dict[bytes, int] = {}
_own_events: dict[bytes, Any] = {}
"""What this process has exported, by handle: the driver does not let a process open its own handles."""


class Gpu:
    """One GPU of this process, in its primary context: the one that torch uses. Close it at the end.

    Args:
        index: among the GPUs that this process sees.

    Raises ConfigError: the bindings, the driver or the GPU are missing.
    """

    def __init__(self, index: int) -> None:
        self._driver = _load()
        if index >= _num_gpus(self._driver):
            raise ConfigError(f"there is no GPU {index}: this process sees {_num_gpus(self._driver)}")
        self._device = _call(self._driver.cuDeviceGet(index))
        self.uuid = f"GPU-{uuid.UUID(bytes=bytes(_call(self._driver.cuDeviceGetUuid(self._device)).bytes))}"
        self._context = _call(self._driver.cuDevicePrimaryCtxRetain(self._device))

    @classmethod
    def find(cls, name: str) -> "Gpu":
        """By UUID. Raises WeightError: this process does not see it."""
        seen: list[str] = []
        for index in range(_num_gpus(_load())):
            gpu = cls(index)
            if gpu.uuid == name:
                return gpu
            seen.append(gpu.uuid)
            gpu.close()
        raise WeightError(f"weights lie on {name}, but this process sees {', '.join(seen) or 'no GPU'}")

    def close(self) -> None:
        """Let go of the context. A second call does nothing."""
        if self._context is not None:
            _call(self._driver.cuDevicePrimaryCtxRelease(self._device))
            self._context = None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The calling thread's CUDA calls are meant for this GPU."""
        _call(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _call(self._driver.cuCtxPopCurrent())

    def synchronize(self) -> None:
        """Wait until all work that this process gave the GPU is done."""
        with self.current():
            _call(self._driver.cuCtxSynchronize())

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Memory that other processes can open; returns its address and handle. Raises WeightError: it is full."""
        with self.current():
            address = int(_call(self._driver.cuMemAlloc(num_bytes), f"{num_bytes} bytes of GPU memory for weights"))
            shared = _call(self._driver.cuIpcGetMemHandle(address))
        handle = ctypes.string_at(shared.getPtr(), HANDLE_BYTES)
        _own_memory[handle] = address
        return address, handle

    def free(self, address: int, handle: bytes) -> None:
        """What `allocate` gave."""
        _own_memory.pop(handle, None)
        with self.current():
            _call(self._driver.cuMemFree(address))

    def open(self, handle: bytes) -> int:
        """The address of another process's memory. Raises WeightError: it is gone."""
        if handle in _own_memory:
            return _own_memory[handle]
        shared = self._driver.CUipcMemHandle()
        _fill(shared, handle)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self.current():
            return int(_call(self._driver.cuIpcOpenMemHandle(shared, lazily), "the owner's GPU memory"))

    def close_opened(self, address: int) -> None:
        """What `open` gave."""
        if address not in _own_memory.values():
            with self.current():
                _call(self._driver.cuIpcCloseMemHandle(address))

    def new_event(self) -> tuple[Any, bytes]:
        """An event that other processes can wait for, and its handle."""
        flags = self._driver.CUevent_flags
        with self.current():
            event = _call(
                self._driver.cuEventCreate(int(flags.CU_EVENT_INTERPROCESS) | int(flags.CU_EVENT_DISABLE_TIMING))
            )
            shared = _call(self._driver.cuIpcGetEventHandle(event))
        handle = ctypes.string_at(shared.getPtr(), HANDLE_BYTES)
        _own_events[handle] = event
        return event, handle

    def record(self, event: Any) -> None:
        """The event comes once all that was copied so far is written."""
        with self.current():
            _call(self._driver.cuEventRecord(event, _LEGACY_STREAM))

    def wait_for(self, handle: bytes) -> None:
        """Until another process's event has come. Raises WeightError: its owner is gone."""
        if handle in _own_events:
            with self.current():
                _call(self._driver.cuEventSynchronize(_own_events[handle]))
            return
        shared = self._driver.CUipcEventHandle()
        _fill(shared, handle)
        with self.current():
            event = _call(self._driver.cuIpcOpenEventHandle(shared), "the owner's event")
            try:
                _call(self._driver.cuEventSynchronize(event))
            finally:
                _call(self._driver.cuEventDestroy(event))

    def destroy(self, event: Any, handle: bytes) -> None:
        """What `new_event` gave."""
        _own_events.pop(handle, None)
        with self.current():
            _call(self._driver.cuEventDestroy(event))

    def copy_from_host(self, address: int, values: np.ndarray) -> None:
        """A contiguous array."""
        with self.current():
            _call(self._driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))

    def copy_to_host(self, values: np.ndarray, address: int) -> None:
        """Fill a contiguous array."""
        with self.current():
            _call(self._driver.cuMemcpyDtoH(values.ctypes.data, address, values.nbytes))

    def copy_rows(self, address: int, source: int, num_rows: int, row_bytes: int, pitch_bytes: int) -> None:
        """Rows that lie `pitch_bytes` apart on this GPU, one behind the other."""
        copy = self._driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = source, pitch_bytes
        copy.dstDevice, copy.dstPitch = address, row_bytes
        copy.WidthInBytes, copy.Height = row_bytes, num_rows
        with self.current():
            _call(self._driver.cuMemcpy2DUnaligned(copy))


class DeviceMemory:
    """Implements `DeviceBytes`. Whoever gets it does not write there."""

    def __init__(self, gpu: Gpu, address: int, num_bytes: int) -> None:
        self._gpu = gpu
        self._address = address
        self._num_bytes = num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Flagged as writable, for torch takes no read-only array.
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def host_parts(self) -> Iterator[np.ndarray]:
        for first in range(0, self._num_bytes, HOST_PART_BYTES):
            part = np.empty(min(HOST_PART_BYTES, self._num_bytes - first), np.uint8)
            self._gpu.copy_to_host(part, self._address + first)
            yield part


def require_gpu() -> None:
    """Raises ConfigError: the bindings, the driver or a GPU are missing."""
    _load()


def _load() -> Any:
    """The driver, ready. Raises ConfigError."""
    mend = "weights.transport=cuda_ipc needs an NVIDIA GPU, its driver and the package cuda-bindings; or choose auto"
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        error, *_ = driver.cuInit(0)
    except (ImportError, RuntimeError) as missing:
        raise ConfigError(f"{mend} ({missing})") from missing
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"{mend} ({error.name})")
    return driver


def _num_gpus(driver: Any) -> int:
    return int(_call(driver.cuDeviceGetCount()))


def _call(answer: tuple[Any, ...], what: str = "a call for weights") -> Any:
    """What a call of the driver returned. Raises WeightError: it failed."""
    error, *values = answer
    if int(error) != 0:
        raise WeightError(f"CUDA refuses {what}: {error.name}")
    return values[0] if values else None


def _fill(shared: Any, handle: bytes) -> None:
    if len(handle) != HANDLE_BYTES:
        raise WeightError(f"{len(handle)} bytes are not a CUDA handle, which has {HANDLE_BYTES}")
    ctypes.memmove(shared.getPtr(), handle, HANDLE_BYTES)
