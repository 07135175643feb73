"""What the ranks of a real engine have in their parameters, read back before it is packed for the device."""

import ctypes
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from beamline.rollout import engine_worker
from beamline.rollout.engine import Engine
from beamline.rollout.engine_worker import EngineWorker
from beamline.rollout.needs_recorder import NeedsRecorder
from beamline.rollout.rank_weights import tensors_of
from beamline.rollout.weight_loader import direct_of, needs_of
from beamline.weights.tensors import Box

PAGE_BYTES = 4096
SEGMENT = "memfd:beamline-weights"
_libc = ctypes.CDLL(None)


class WatchedWorker(EngineWorker):
    """Reads back what it loads, once it is told to; loads as any other otherwise."""

    def needed_boxes(self) -> dict[str, list[Box]]:
        """What the rank needs of every tensor."""
        return {name: need.boxes for name, need in needs_of(self.model_runner.model).items()}

    def held_dtypes(self) -> dict[str, str]:
        """In which it holds them."""
        return {name: need.dtype for name, need in needs_of(self.model_runner.model).items()}

    def left_to_vllm(self) -> list[str]:
        """Tensors that only vLLM's own loading can load."""
        assert self._direct is not None
        return sorted(self._direct.left)

    def load_directly(self, is_direct: bool) -> None:
        """From now on, or else as vLLM loads."""
        self._direct = direct_of(self.model_runner.model) if is_direct else None

    def unshared_parameters(self) -> list[str]:
        """Parameters that do not lie in a segment of an owner of weights, of all that this process has mapped."""
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if SEGMENT in line]
        mapped = [[int(edge, 16) for edge in line[0].split("-")] for line in lines]
        return [
            name
            for name, one in self.model_runner.model.named_parameters()
            if one.numel() and not any(first <= one.data_ptr() and one.data_ptr() < last for first, last in mapped)
        ]

    def lock_cache(self, num_pages: int) -> None:
        """Lock the last pages of the key-value cache into memory, which nothing can then give back; 0 unlocks them."""
        last = self.model_runner.kv_caches[-1].untyped_storage()
        end = (last.data_ptr() + last.nbytes()) // PAGE_BYTES * PAGE_BYTES
        change = _libc.mlock if num_pages else _libc.munlock
        num_bytes = (num_pages or self._num_locked) * PAGE_BYTES
        assert change(ctypes.c_void_p(end - num_bytes), ctypes.c_size_t(num_bytes)) == 0
        self._num_locked = num_pages

    def activate_watched(self) -> list[tuple[str, Box, str]]:
        """`beamline_activate`; says of every box that was loaded what its place in a parameter then held."""
        reader = _Reader()
        engine_worker.tensors_of = lambda *which: reader.follow(tensors_of(*which))  # pyright: ignore[reportAttributeAccessIssue]
        methods = {id(m.quant_method): m.quant_method for m in self.model_runner.model.modules() if _has_method(m)}
        for method in methods.values():
            method.process_weights_after_loading = _after(reader.read_back, method.process_weights_after_loading)
        try:
            self.beamline_activate()
        finally:
            engine_worker.tensors_of = tensors_of
            for method in methods.values():
                del method.process_weights_after_loading
        reader.read_back()
        return reader.found


class _Reader(NeedsRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Box, str]] = []
        self._loaded: list[tuple[str, Box, torch.Tensor]] = []

    def note(self, name: str, box: Box, target: torch.Tensor | None, *, is_box: bool = False) -> None:
        assert target is not None, f"{name} was not copied straight into a parameter"
        if not target.is_meta:
            self._loaded.append((name, box, target))

    def read_back(self) -> None:
        """Hash what was loaded since the last time. Packing comes next, and overwrites it."""
        for name, box, target in self._loaded:
            self.found.append((name, box, digest(target.detach().numpy())))
        self._loaded = []


def digest(values: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values))


async def assert_loads_bit_for_bit(engine: Engine, manifest: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Load a policy; every element of every tensor must be on some rank, and each rank's parameters equal to the bit.

    Args:
        engine: its ranks are `WatchedWorker`s.
        manifest: of the policy.
        tensors: what was exported, in the dtype in which the engine holds it.
    """
    call: Any = engine.__getattribute__("_call")
    await engine.stage_weights(manifest)
    held = {name: np.zeros(array.shape, bool) for name, array in tensors.items()}
    for found in await call("activate_watched"):
        assert found
        for name, box, loaded in found:
            part = tuple(slice(*edges) for edges in box)
            assert loaded == digest(tensors[name][part]), f"{name}{list(box)} differs"
            held[name][part] = True
    assert [name for name, mask in held.items() if not mask.all()] == [], "not loaded by any rank"


def _has_method(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")


def _after(first: Any, then: Any) -> Any:
    @wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both
