"""Which transport carries the weights, and the two ends of each.

Imports of a transport's library happen here, when it is chosen.
"""

from pathlib import Path
from typing import Literal

from beamline.protocol.errors import ConfigError
from beamline.weights.manifest import CheckpointPlace, CudaPlace, NixlPlace, Place, ShmPlace
from beamline.weights.transport import Owner, Reader

COPIES = 2
"""Policies that an owner keeps: one is read while the next is written."""


def choose(
    transport: str, *, one_host: bool, device: Literal["cpu", "cuda"], one_device: bool, num_bytes: int, free_bytes: int
) -> str:
    """The transport of a run: shm, cuda_ipc, nixl or checkpoint.

    Args:
        transport: as configured; `auto` is resolved by where the two sides are, and by size.
        one_host: whether trainer and engines run on the same one.
        device: where both sides have their parameters.
        one_device: whether every engine rank has the GPU of the trainer rank that it fetches from.
        num_bytes: of a policy.
        free_bytes: of main memory, on the trainer's host.

    Raises:
        ConfigError: the transport that is configured cannot work there.
    """
    shares_gpu = device == "cuda" and one_host and one_device
    if transport == "cuda_ipc" and not shares_gpu:
        what = "parameters are in main memory" if device == "cpu" else "trainer and engines do not share a GPU"
        raise ConfigError(f"weights.transport=cuda_ipc needs one GPU for both sides, but {what}: choose auto")
    if transport == "shm" and not one_host:
        raise ConfigError(
            "weights.transport=shm needs trainer and engines on one host: choose nixl, or checkpoint with a "
            "weights.directory that all hosts see"
        )
    if transport != "auto":
        return transport
    if shares_gpu:
        return "cuda_ipc"
    if not one_host:
        return "nixl"
    return "shm" if COPIES * num_bytes <= free_bytes else "checkpoint"


def free_memory_bytes() -> int:
    """Of this host's main memory, what a process may still take."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def owner_of(transport: str, directory: Path, rank: int, device: int = 0) -> Owner:
    """The owner's end for one rank of the trainer.

    Args:
        transport: shm, cuda_ipc, nixl or checkpoint; `auto` was resolved by `choose`.
        directory: for sockets; of a checkpoint the files too.
        rank: of the trainer.
        device: index of its GPU among those that the process sees; for cuda_ipc alone.

    Raises:
        ConfigError: the machine lacks what the transport needs.
        WeightError: the directory cannot be used.
    """
    socket = directory / f"rank-{rank:05d}.sock"
    match transport:
        case "shm":
            from beamline.weights.shm import ShmOwner

            return ShmOwner(socket)
        case "cuda_ipc":
            from beamline.weights.cuda_ipc import CudaOwner

            return CudaOwner(socket, device)
        case "nixl":
            from beamline.weights.nixl import NixlOwner

            return NixlOwner()
        case "checkpoint":
            from beamline.weights.checkpoint import CheckpointOwner

            return CheckpointOwner(directory, rank)
        case _:
            raise ConfigError(f"weights.transport={transport!r} is none of shm, cuda_ipc, nixl, checkpoint")


def reader_of(place: Place) -> Reader:
    """The reader's end for a kind of place. Raises ConfigError: the machine lacks what the transport needs."""
    match place:
        case ShmPlace():
            from beamline.weights.shm import ShmReader

            return ShmReader()
        case CudaPlace():
            from beamline.weights.cuda_ipc import CudaReader

            return CudaReader()
        case NixlPlace():
            from beamline.weights.nixl import NixlReader

            return NixlReader()
        case CheckpointPlace():
            from beamline.weights.checkpoint import CheckpointReader

            return CheckpointReader()
