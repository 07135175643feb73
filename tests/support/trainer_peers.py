"""Data-parallel ranks as threads of one process, each with a table policy of its own."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.outlet import Outlet
from beamline.trainer.peers import Arrays
from beamline.weights.manifest import WeightManifest
from beamline.weights.tensors import Shard

DEADLINE_S = 20.0


class Meeting:
    """Where the ranks lay down what they tell each other."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)
        self._told: list[object] = [None] * num_ranks

    def exchange[T](self, rank: int, what: T) -> list[T]:
        """Everyone's, in the order of the ranks."""
        self._told[rank] = what
        self._barrier.wait()
        found = list(self._told)
        self._barrier.wait()
        return found  # pyright: ignore[reportReturnType]


class ThreadPeers:
    """Implements `beamline.trainer.peers.Peers`."""

    def __init__(self, data_rank: int, meeting: Meeting) -> None:
        self.data_rank = data_rank
        self._meeting = meeting

    def largest(self, counts: Sequence[int]) -> list[int]:
        return [max(column) for column in zip(*self._meeting.exchange(self.data_rank, list(counts)), strict=True)]

    def gather(self, arrays: Arrays) -> list[Arrays]:
        return self._meeting.exchange(self.data_rank, arrays)

    def collect(self, payload: bytes) -> list[bytes]:
        found = self._meeting.exchange(self.data_rank, payload)
        return found if self.data_rank == 0 else []

    def meet(self) -> None:
        self._meeting.exchange(self.data_rank, None)


class DataParallelPolicy(FakePolicy):
    """Sums its gradients over the ranks, as the real policy's optimizer does."""

    def __init__(self, vocab_size: int, peers: ThreadPeers, meeting: Meeting) -> None:
        super().__init__(vocab_size)
        self._rank, self._meeting = peers.data_rank, meeting

    def optimizer_step(self, lr: float) -> float:
        assert self.table_VV.grad is not None
        self.table_VV.grad = torch.stack(self._meeting.exchange(self._rank, self.table_VV.grad)).sum(0)
        return super().optimizer_step(lr)


class NoOwner:
    """Implements `Owner` for ranks that export nothing."""

    def export(self, policy_version: int, shards: Iterable[Shard]) -> None:
        raise AssertionError(f"policy {policy_version} was to stay where it is")

    def describe(self) -> WeightManifest:
        raise AssertionError("nothing was exported")

    def close(self) -> None:
        """There is nothing to let go of."""


NO_OUTLET = Outlet(owner=NoOwner())


def on_ranks[T](num_ranks: int, work: Callable[[ThreadPeers, Meeting], T]) -> list[T]:
    """What every rank's work returned."""
    meeting = Meeting(num_ranks)
    with ThreadPoolExecutor(num_ranks) as threads:
        jobs = [threads.submit(work, ThreadPeers(rank, meeting), meeting) for rank in range(num_ranks)]
        return [job.result() for job in jobs]
