"""vLLM's worker with what a rank needs beside: weights from shared memory, memory given back, notes on every step.

`collective_rpc` calls its methods by name. An exception here would end up as bare text on the other side, so whatever
can be refused is refused before.
"""

import ctypes
import gc
import glob
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from beamline.rollout.late_outputs import StepNotes
from beamline.rollout.route_capture import ROWS, RouteCapture
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmReader

# On every update it warns of modules that have no weights, such as rotary tables; the names were checked before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# Segments are mapped read-only, and vLLM only copies from them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4
_PAGE_BYTES = 4096

_OF_DEVICE = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
_Worker: Any = resolve_obj_by_qualname(_OF_DEVICE)


class EngineWorker(_Worker):
    """One rank; its first `policy_version`, and whether it notes `routed_experts`, are in vLLM's additional_config."""

    def init_device(self) -> None:
        super().init_device()
        _unlink_segments(get_tp_group().device_communicator)
        _unlink_segments(get_pp_group().device_communicator)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        settings, runner = self.vllm_config.additional_config, self.model_runner
        self._policy_version: int = settings["policy_version"]
        self._routes = RouteCapture(runner) if settings["routed_experts"] else None
        if not get_pp_group().is_first_rank:
            # vLLM makes the buffers that a stage receives into while it measures memory, which is skipped on a CPU.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
            if self._routes is not None:
                runner.intermediate_tensors.tensors[ROWS] = self._routes.rows

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if output.req_ids:
            routes, version = self._routes, self._policy_version
            output.aux_output_connector_output = routes.take(version) if routes else StepNotes(version)
        return output

    def beamline_load_weights(self, manifest: bytes, policy_version: int) -> None:
        """Overwrite all parameters in place from the manifest's segment, packed anew where the device packs them."""
        reader = ShmReader.open(WeightManifest.decode(manifest))
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=_tensors(reader))
        self._policy_version = policy_version

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


def _unlink_segments(communicator: Any) -> None:
    """Take the names from the shared memory by which CPU ranks talk: all have it open, and vLLM leaves it behind."""
    name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
    if name is not None:
        for segment in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
            segment.unlink(missing_ok=True)


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
