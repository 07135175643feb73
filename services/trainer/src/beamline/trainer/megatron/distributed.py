"""The ranks of the trainer: process groups by torch, model-parallel groups by Megatron."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore, TCPStore

RENDEZVOUS_DEADLINE = timedelta(seconds=120)


@dataclass(frozen=True)
class Layout:
    """How the model is cut. Data parallelism is what is left of the world."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def is_parallel(self) -> bool:
        """More than one rank holds a copy of the model."""
        return self.tensor * self.expert * self.pipeline > 1

    @property
    def sequence_parallel(self) -> bool:
        """Megatron's MoE layers need it under tensor parallelism."""
        return self.tensor > 1


@dataclass(frozen=True)
class Ranks:
    """Which rank this process is."""

    rank: int = 0
    world_size: int = 1
    master_port: int = 0
    """Loopback port of rank 0's store; 0 for a single rank, which needs none."""


def start(ranks: Ranks, layout: Layout) -> None:
    """Join the process group once (NCCL with CUDA, else gloo on loopback), and build Megatron's groups.

    Raises ValueError where the layout does not fit the world, and torch's error after two minutes where a
    rank stays away.
    """
    if ranks.world_size % (layout.tensor * layout.pipeline) or ranks.world_size < layout.expert:
        raise ValueError(
            f"{ranks.world_size} ranks cannot hold tensor={layout.tensor} x pipeline={layout.pipeline} with "
            f"expert={layout.expert}: start a multiple of {layout.tensor * layout.pipeline}"
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host's own address
    if not dist.is_initialized():
        store = (
            HashStore()
            if ranks.world_size == 1
            else TCPStore("127.0.0.1", ranks.master_port, ranks.world_size, ranks.rank == 0, RENDEZVOUS_DEADLINE)
        )
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=RENDEZVOUS_DEADLINE
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )


def leave_layout() -> None:
    """Drop Megatron's groups; the ranks stay joined and may `start` with another layout."""
    parallel_state.destroy_model_parallel()


def stop() -> None:
    """Leave all groups."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
