"""What runs inside vLLM's worker processes beside its own worker: weights from shared memory, and memory given back.

vLLM mixes this class into its worker on every device (`worker_extension_cls`); `collective_rpc` calls its methods by
name. An exception here would end up as bare text on the other side, so whatever can be refused is refused before.
"""

import ctypes
import gc
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from beamline.rollout.late_outputs import SERVED
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmReader

# On every update it warns of modules that have no weights, such as rotary tables; the names were checked before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# Segments are mapped read-only, and vLLM only copies from them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
_PAGE_BYTES = 4096


class EngineWorker:
    """Mixed into vLLM's worker, whose `model_runner` it uses."""

    model_runner: Any

    def beamline_load_weights(self, manifest: bytes) -> None:
        """Overwrite all parameters in place from the manifest's segment, packed anew where the device packs them."""
        described = WeightManifest.decode(manifest)
        reader = ShmReader.open(described)
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=_tensors(reader))
        SERVED.version = described.policy_version

    def beamline_release_memory(self) -> tuple[int, int]:
        """Drop the key-value cache's pages; they stay mapped and read as zeros. Resident bytes before and after."""
        before = _resident_bytes()
        for storage in _storages(self.model_runner.kv_caches):
            _drop_pages(storage.data_ptr(), storage.nbytes())
        gc.collect()
        _libc.malloc_trim(0)
        return before, _resident_bytes()

    def beamline_resident_bytes(self) -> int:
        """Resident memory of this process."""
        return _resident_bytes()


def _tensors(reader: ShmReader) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, content in reader.tensors():
        yield entry.name, torch.frombuffer(content, dtype=getattr(torch, entry.dtype)).view(entry.shape)


def _storages(caches: list[Any]) -> list[torch.UntypedStorage]:
    """The distinct storages behind the layers' caches; layers of unlike attention may share one."""
    storages: dict[int, torch.UntypedStorage] = {}
    for cache in caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    return list(storages.values())


def _drop_pages(address: int, num_bytes: int) -> None:
    """Tell the kernel that the whole pages inside [address, address + num_bytes) are not needed."""
    start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    end = (address + num_bytes) // _PAGE_BYTES * _PAGE_BYTES
    if end > start and _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise of {end - start} bytes of the key-value cache failed")


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss
