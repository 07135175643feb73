"""The ranks of the trainer: process groups by torch, model-parallel groups by Megatron."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore, Store, TCPStore

RENDEZVOUS_DEADLINE = timedelta(seconds=120)
COLLECTIVE_DEADLINE = timedelta(minutes=30)
"""Ranks that wait for one that writes files, say. A rank that has ended is not waited for: see `ranks`."""


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
    port: int = 0
    """Loopback port of rank 0's store; rank 0 takes a free one for 0."""


def open_store(ranks: Ranks) -> Store:
    """Where the ranks meet. Rank 0 keeps it, on loopback alone; the others have two minutes to reach it."""
    if ranks.world_size == 1:
        return HashStore()
    listening, port = None, ranks.port
    if ranks.rank == 0:
        server = socket.create_server(("127.0.0.1", port))  # TCPStore's own would listen on every address
        port, listening = server.getsockname()[1], server.detach()
    return TCPStore(
        "127.0.0.1",
        port,
        ranks.world_size,
        is_master=ranks.rank == 0,
        timeout=RENDEZVOUS_DEADLINE,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def start(ranks: Ranks, layout: Layout, store: Store | None = None) -> None:
    """Join the process group once (NCCL with CUDA, else gloo on loopback), and build Megatron's groups.

    Args:
        store: from `open_store`, if the caller has opened it.

    Raises:
        ValueError: the layout does not fit the world.
        RuntimeError: torch's own, after two minutes, where a rank stays away.
    """
    if ranks.world_size % (layout.tensor * layout.pipeline) or ranks.world_size < layout.expert:
        raise ValueError(
            f"{ranks.world_size} ranks cannot hold tensor={layout.tensor} x pipeline={layout.pipeline} with "
            f"expert={layout.expert}: start a multiple of {layout.tensor * layout.pipeline}"
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host's own address
    else:
        torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            store=store or open_store(ranks),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=COLLECTIVE_DEADLINE,
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,  # Megatron's own optimizers use them beside the others
    )


def leave_layout() -> None:
    """Drop Megatron's groups; the ranks stay joined and may `start` with another layout."""
    parallel_state.destroy_model_parallel()


def stop() -> None:
    """Leave all groups."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
