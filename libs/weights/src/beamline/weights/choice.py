"""Which transport carries the weights, and the two ends of each.

Imports of a transport's library happen here, when it is chosen.
"""

from pathlib import Path

from beamline.protocol.errors import ConfigError
from beamline.weights.manifest import CheckpointPlace, CudaPlace, NixlPlace, Place, ShmPlace
from beamline.weights.transport import Owner, Reader


def owner_of(transport: str, directory: Path, rank: int) -> Owner:
    """The owner's end for one rank of the trainer.

    Args:
        transport: shm, cuda_ipc, nixl or checkpoint; `auto` was resolved by `choose`.
        directory: for sockets; of a checkpoint the files too.

    Raises:
        ConfigError: the machine lacks what the transport needs.
    """
    match transport:
        case "shm":
            from beamline.weights.shm import ShmOwner

            return ShmOwner(directory / f"rank-{rank:05d}.sock")
        case _:
            raise ConfigError(f"weights.transport={transport!r} is none of shm, cuda_ipc, nixl, checkpoint")


def reader_of(place: Place) -> Reader:
    """The reader's end for a kind of place. Raises ConfigError: the machine lacks what the transport needs."""
    match place:
        case ShmPlace():
            from beamline.weights.shm import ShmReader

            return ShmReader()
        case CudaPlace() | NixlPlace() | CheckpointPlace():
            raise ConfigError(f"{type(place).__name__}: no reader")
