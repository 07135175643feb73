"""Megatron on a CPU: the few spots of Megatron-Core that assume CUDA.

`adapt()` does nothing where CUDA is there, so the GPU path is Megatron as shipped. It has to run before any
other import of megatron, which is why the package's `__init__` calls it.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


def adapt() -> None:
    """Make Megatron-Core usable without CUDA; idempotent."""
    if torch.cuda.is_available() or torch.cuda.current_device is _cpu_device:
        return
    torch.cuda.current_device = _cpu_device  # Megatron passes it as `device=`
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = _current_stream
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.stream = contextlib.nullcontext
    torch.zeros = _without_cuda(torch.zeros)  # the schedules say device="cuda"
    _import_core_uncompiled()
    import megatron.core.tensor_parallel.random as rng

    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _split_sizes_become_numpy()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Import without the warnings and log lines by which Megatron reports each CUDA extension that is absent."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _cpu_device() -> torch.device:
    return CPU


def _without_cuda(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with a literal CUDA device taken for the CPU."""

    def make(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*size, device=CPU if device == "cuda" else device, **kwargs)

    return make


class _Event:
    """A CUDA event where all work is done by the time it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Stream(_Event):
    """A CUDA stream where every operation has finished when it returns."""

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


_THE_STREAM = _Stream()


def _current_stream(device: Any = None) -> _Stream:
    return _THE_STREAM


def _import_core_uncompiled() -> None:
    """Import Megatron-Core with `torch.compile` as the identity.

    Core decorates its fusions with it at import, which pulls in all of Inductor and would then compile
    C++ in the first step; eager is the same arithmetic.
    """
    assert "megatron.core" not in sys.modules, "megatron.core was imported before it was adapted to the CPU"
    compile_, torch.compile = torch.compile, _identity
    try:
        with quietly():
            import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_


def _identity(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return (lambda inner: inner) if function is None else function


def _split_sizes_become_numpy() -> None:
    """Core's all-to-all wants its split sizes as numpy, and converts only what it finds on CUDA."""
    with quietly():
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
