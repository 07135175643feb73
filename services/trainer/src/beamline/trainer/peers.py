"""What the ranks of a trainer tell each other beside the model's own collectives.

`megatron.peers.TorchPeers` joins many ranks; `Alone` is the one rank of a trainer that has no others.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

type Arrays = Mapping[str, np.ndarray]


class Peers(Protocol):
    """Calls meet: every rank makes the same ones in the same order."""

    @property
    def data_rank(self) -> int:
        """Which share of a batch is this rank's. Ranks of one share differ in their part of the model."""
        ...

    def largest(self, counts: Sequence[int]) -> list[int]:
        """Each count's largest value over the shares."""
        ...

    def gather(self, arrays: Arrays) -> list[Arrays]:
        """Every share's arrays, in the order of the shares."""
        ...

    def collect(self, payload: bytes) -> list[bytes]:
        """What every rank has laid down, in the order of ranks; rank 0 alone gets it, the others get nothing."""
        ...

    def meet(self) -> None:
        """Return when every rank has come this far."""
        ...


class Alone:
    """Implements `Peers` for a single rank."""

    data_rank = 0

    def largest(self, counts: Sequence[int]) -> list[int]:
        return list(counts)

    def gather(self, arrays: Arrays) -> list[Arrays]:
        return [arrays]

    def collect(self, payload: bytes) -> list[bytes]:
        return [payload]

    def meet(self) -> None:
        """Nobody else has to come."""


ALONE = Alone()
