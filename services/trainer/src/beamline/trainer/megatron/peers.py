"""`Peers` over torch's process groups."""

import io
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from beamline.trainer.peers import Arrays


class TorchPeers:
    """Implements `beamline.trainer.peers.Peers`; `distributed.start` comes first."""

    def __init__(self) -> None:
        self.data_rank = parallel_state.get_data_parallel_rank()
        self._shares = parallel_state.get_data_parallel_group()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def largest(self, counts: Sequence[int]) -> list[int]:
        found = torch.tensor(counts, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._shares)
        return found.tolist()

    def gather(self, arrays: Arrays) -> list[Arrays]:
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        sizes, padded = self._padded(file.getvalue(), self._shares)
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=self._shares)
        return [dict(np.load(io.BytesIO(payload), allow_pickle=False)) for payload in _unpadded(found, sizes)]

    def collect(self, payload: bytes) -> list[bytes]:
        sizes, padded = self._padded(payload)
        found = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else []
        dist.gather(padded, found or None, dst=0)
        return _unpadded(found, sizes[: len(found)])

    def _padded(self, payload: bytes, group: dist.ProcessGroup | None = None) -> tuple[list[int], torch.Tensor]:
        """Every member's number of bytes, and this one's payload, as long as the longest."""
        own = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        sizes = [int(size) for size in found]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return sizes, padded

    def meet(self) -> None:
        dist.barrier()


def _unpadded(payloads: list[torch.Tensor], sizes: list[int]) -> list[bytes]:
    return [payload[:size].cpu().numpy().tobytes() for payload, size in zip(payloads, sizes, strict=True)]
