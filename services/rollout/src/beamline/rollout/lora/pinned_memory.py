"""The way from main memory into a GPU's slots: through pinned memory, on a stream beside the one that samples."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_ALIGNMENT_BYTES = 64


class PinnedMemory:
    """One buffer, as large as the largest policy so far; of no use, and without cost, where the slots lie on a CPU.

    Args:
        device: of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_used = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_used else None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def beside_sampling(self, num_bytes: int, num_tensors: int) -> Iterator[None]:
        """Inside, copies do not wait for the device's other work; at the end they are done. There is room for so much.

        Where this raises, nothing was copied or all copies have ended.
        """
        if self._stream is None:
            yield
            return
        needed = num_bytes + num_tensors * _ALIGNMENT_BYTES
        if self._buffer.numel() < needed:
            self._buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=True)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def through(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of main memory as copies in pinned memory, others as they are."""
        filled = 0
        for name, tensor in tensors:
            if not self._is_used or tensor.is_cuda:
                yield name, tensor
                continue
            place = self._buffer[filled : filled + tensor.nbytes]
            filled += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            yield name, place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
