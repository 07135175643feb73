"""vLLM's worker with what a rank needs beside: weights in two steps, memory given back, notes on every step.

`collective_rpc` calls its methods by name, between the engine's steps. An exception here ends the engine, so what may
go wrong with a policy is an answer.
"""

import gc
import glob
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from beamline.rollout.late_outputs import StepNotes
from beamline.rollout.lora.rank_adapters import RankAdapters
from beamline.rollout.lora.slots import LoraSlots, prepare
from beamline.rollout.rank_weights import RankWeights, tensors_of
from beamline.rollout.resident_pages import drop_pages, give_back_heap, resident_bytes, resident_bytes_in
from beamline.rollout.route_capture import ROWS, RouteCapture
from beamline.rollout.shared_parameters import SharedParameters
from beamline.rollout.weight_loader import direct_of, needs_of
from beamline.weights.staging import Staged

# On every update it warns of modules that have no weights, such as rotary tables; the names were checked before.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

_OF_DEVICE = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
_SWITCH_INTERVAL_S = 5e-4
"""Adapters are many small tensors, and while they are fetched the thread that samples asks for the interpreter after
every operation: Python's own 5 ms each time would be a pause."""
_Worker: Any = resolve_obj_by_qualname(_OF_DEVICE)


class EngineWorker(_Worker):
    """One rank; first version, and whether routes are noted and parameters shared, are in vLLM's additional_config."""

    def init_device(self) -> None:
        super().init_device()
        _unlink_segments(get_tp_group().device_communicator)
        _unlink_segments(get_pp_group().device_communicator)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        settings, runner = self.vllm_config.additional_config, self.model_runner
        if settings["lora"]:
            prepare(runner, settings["lora"])
        super().load_model(*args, **kwargs)
        self.lora_slots = LoraSlots(runner.lora_manager, runner.lora_manager.adapters) if settings["lora"] else None
        self._policy_version: int = settings["policy_version"]
        self._routes = RouteCapture(runner) if settings["routed_experts"] else None
        rank = f"rank {self.rank} of {self.parallel_config.world_size}"
        self._take_policies(rank)
        if not get_pp_group().is_first_rank:
            # vLLM makes the buffers that a stage receives into while it measures memory, which is skipped on a CPU.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
            if self._routes is not None:
                runner.intermediate_tensors.tensors[ROWS] = self._routes.rows

    def _take_policies(self, rank: str) -> None:
        """Make ready for policies: of the model's parameters, or of adapters where it has slots for them."""
        settings, runner = self.vllm_config.additional_config, self.model_runner
        dtype = str(runner.dtype).removeprefix("torch.")
        self._direct, self._shared, self._adapters = None, None, None
        if self.lora_slots is not None:
            held = dict.fromkeys(self.lora_slots.needs, dtype)
            self._weights = RankWeights(self.lora_slots.needs, held, dtype, rank)
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._adapters = RankAdapters(self.lora_slots, self._weights, runner.device)
            return
        needs = needs_of(runner.model)
        held = {name: need.dtype for name, need in needs.items()}
        self._weights = RankWeights({name: need.boxes for name, need in needs.items()}, held, dtype, rank)
        self._direct = direct_of(runner.model)
        self._shared = SharedParameters(runner.model, needs) if settings["shared_parameters"] else None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if output.req_ids:
            routes, versions = self._routes, self._versions_of_batch()
            output.aux_output_connector_output = routes.take(versions) if routes else StepNotes(versions)
        return output

    def _versions_of_batch(self) -> list[int]:
        """The policy of each request of the step that has just run."""
        batch = self.model_runner.input_batch
        if self._adapters is None:
            return [self._policy_version] * batch.num_reqs
        return self._adapters.versions_of(batch.request_lora_mapping[: batch.num_reqs].tolist())

    def beamline_stage(self, manifest: bytes, slot: int | None = None) -> int | str | None:
        """Begin to fetch a policy, adapters into a slot; answers as `beamline_staged`."""
        if self._adapters is None:
            self._weights.start(manifest)
        else:
            assert slot is not None, "adapters are staged into a slot"
            self._adapters.start(manifest, slot)
        return self._weights.answer()

    def beamline_staged(self) -> int | str | None:
        """The bytes that were fetched, or why it failed; None while that is not known."""
        return self._weights.answer()

    def beamline_drop(self) -> None:
        """Let go of what is staged or being fetched."""
        self._weights.drop()

    def beamline_bind(self, bindings: list[list[int]]) -> None:
        """What the ids of adapters stand for from the next step on."""
        assert self._adapters is not None, "the engine has no adapters"
        self._adapters.bind(bindings)

    def beamline_activate(self) -> None:
        """Make what is staged the parameters: by pointing them at it, else in place and packed as the device packs."""
        staged = self._weights.take()
        with torch.no_grad():
            left = self._load_quickly(staged)
            if left is None or left:
                self.model_runner.reload_weights(weights_iterator=tensors_of(staged, left))
        if self._shared:
            self._shared.hold(staged)
        else:
            staged.fence()
        self._policy_version = staged.manifest.policy_version

    def _load_quickly(self, staged: Staged) -> set[str] | None:
        """Load what needs no loader of vLLM's; returns the tensors that do, None for all."""
        if self._shared:
            return self._shared.share(staged)
        if self._direct:
            self._direct.load(tensors_of(staged, self._direct.names))
            return self._direct.left
        return None

    def beamline_release_memory(self) -> tuple[int, int, int]:
        """Drop the key-value cache's pages; they stay mapped. Resident bytes before and after, and of the cache."""
        before = resident_bytes()
        self.beamline_drop_cache()
        gc.collect()
        give_back_heap()
        return before, *self.beamline_memory()

    def beamline_drop_cache(self) -> None:
        """Drop the key-value cache's pages alone: all that a few borrowed blocks have taken."""
        for storage in _storages(self.model_runner.kv_caches):
            drop_pages(storage.data_ptr(), storage.nbytes())

    def beamline_memory(self) -> tuple[int, int]:
        """Resident bytes of this process, and of the key-value cache."""
        storages = _storages(self.model_runner.kv_caches)
        return resident_bytes(), sum(resident_bytes_in(one.data_ptr(), one.nbytes()) for one in storages)


def _unlink_segments(communicator: Any) -> None:
    """Take the names from the shared memory by which CPU ranks talk: all have it open, and vLLM leaves it behind."""
    name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
    if name is not None:
        for segment in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
            segment.unlink(missing_ok=True)


def _storages(caches: list[Any]) -> list[torch.UntypedStorage]:
    """The distinct storages behind the layers' caches; layers of unlike attention may share one."""
    storages: dict[int, torch.UntypedStorage] = {}
    for cache in caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
    return list(storages.values())
