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
        payloads = self._gather_bytes(file.getvalue())
        return [dict(np.load(io.BytesIO(payload), allow_pickle=False)) for payload in payloads]

    def _gather_bytes(self, payload: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self._shares.size())]
        dist.all_gather(sizes, torch.tensor([len(payload)], device=self._device), group=self._shares)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=self._device)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        payloads = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(payloads, padded, group=self._shares)
        return [found[: int(size)].cpu().numpy().tobytes() for found, size in zip(payloads, sizes, strict=True)]

    def meet(self) -> None:
        dist.barrier()
