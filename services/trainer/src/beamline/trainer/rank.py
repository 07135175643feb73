"""One rank's work: the verbs that all ranks carry out together, each on its part of the model and of the batch."""

import ctypes
import gc
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from beamline.algorithms.advantage_check import AdvantageError
from beamline.algorithms.loss_check import LossError
from beamline.algorithms.losses import PolicyLoss
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import TrainBatch
from beamline.runtime.blob_store import BlobStore
from beamline.trainer.assemble import PLAIN, Reading, assemble
from beamline.trainer.batch import Batch
from beamline.trainer.commands import AnyCommand, Export, Save, SaveWeights, Score, Train, Trim
from beamline.trainer.outlet import Outlet, join
from beamline.trainer.peers import Peers
from beamline.trainer.penalty import RewardPenalty
from beamline.trainer.policy import NotSaved, Policy
from beamline.trainer.progress import Progress
from beamline.trainer.train_step import StepConfig, train_step
from beamline.trainer.weights_out import DISK_ERRORS
from beamline.weights.manifest import WeightManifest

_COUNT = struct.Struct("<q")
_TOLD = ":"
"""Before what a rank says of its files: nothing at all cannot be collected."""

type Tell = Callable[[AnyCommand], None]
"""Sends a command to all other ranks."""


def tell_nobody(_: AnyCommand) -> None:
    """Of a rank that does as it was told."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step takes from the run's configuration."""

    loss: PolicyLoss
    max_tokens: int
    """Of one micro-batch."""
    reading: Reading = PLAIN
    penalty: RewardPenalty | None = None
    has_dropout: bool = False


class Rank:
    """Rank 0 tells the others what it does, then does its own share. All methods but `share` run on one thread.

    Raises what `Policy` raises. A rank that fails leaves the others waiting: whoever runs them ends them all.
    """

    def __init__(
        self, policy: Policy, peers: Peers, settings: StepSettings, outlet: Outlet, tell: Tell = tell_nobody
    ) -> None:
        self._policy = policy
        self._peers = peers
        self._settings = settings
        self._outlet = outlet
        self._tell = tell
        self.progress = Progress(policy)

    async def share(self, message: TrainBatch, blobs: BlobStore) -> Batch:
        """What the message deals to this rank. Raises as `assemble` does."""
        return await assemble(message, blobs, self._peers.data_rank, self._settings.reading)

    def train(self, message: TrainBatch, share: Batch, lr: float) -> dict[str, float]:
        """One step; the metrics are those of all ranks.

        Raises ConfigError for a loss or an advantage of the user's own whose answer cannot be trained.
        """
        self._tell(Train(batch=message, lr=lr))
        s = self._settings
        config = StepConfig(s.loss, s.max_tokens, lr, s.penalty, s.has_dropout)
        try:
            evened = self._evened(share)
            with self.progress.of(evened, config):
                stats = train_step(self._policy, evened, config, self._peers)
        except (AdvantageError, LossError) as error:
            raise ConfigError(f"step {message.step}: {error}") from error
        return stats.metrics_of(self._peers.gather(stats.parts()))

    def export(self, policy_version: int) -> WeightManifest | None:
        """Every rank exports its own shards; rank 0 alone gets the manifest of the whole policy.

        Raises WeightError, on rank 0: a rank had no room. What was exported before is still there, on every rank.
        """
        self._tell(Export(policy_version=policy_version))
        parts = self._peers.collect(self._outlet.export(policy_version, self._policy))
        return join(parts) if parts else None

    def score(self, tokens: Sequence[int]) -> list[float]:
        """As `Policy.score`."""
        self._tell(Score(tokens=list(tokens)))
        return self._policy.score(tokens)

    def save(self, directory: Path) -> None:
        """As `Policy.save`; when it returns, every rank has written its files.

        Raises NotSaved, on rank 0: which ranks have failed and why. All have taken part, and can go on.
        """
        self._tell(Save(directory=str(directory)))
        self._write(self._policy.save, directory)

    def save_weights(self, directory: Path) -> None:
        """As `Policy.save_weights`, likewise."""
        self._tell(SaveWeights(directory=str(directory)))
        self._write(self._policy.save_weights, directory)

    def trim(self) -> int:
        """Gradients and activations are gone since the last update; every rank hands their pages back to the system.

        Returns the bytes of gradients that are there all the same: of all ranks on rank 0, 0 elsewhere.
        """
        self._tell(Trim())
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        torch.cuda.empty_cache()  # nothing where there is no GPU
        held = self._peers.collect(_COUNT.pack(self._policy.gradient_bytes()))
        return sum(_COUNT.unpack(part)[0] for part in held)

    def close(self) -> None:
        """Let go of everything that this rank has exported."""
        self._outlet.owner.close()

    def _write(self, write: Callable[[Path], None], directory: Path) -> None:
        """Write this rank's files, and learn on rank 0 how all have fared."""
        error = ""
        try:
            write(directory)
        except DISK_ERRORS as failure:
            error = f"{failure}" or type(failure).__name__
        errors = [part.decode().removeprefix(_TOLD) for part in self._peers.collect(f"{_TOLD}{error}".encode())]
        told = [f"rank {rank}: {text}" if len(errors) > 1 else text for rank, text in enumerate(errors) if text]
        if told:
            raise NotSaved("; ".join(told))

    def _evened(self, share: Batch) -> Batch:
        """With as many micro-batches as the rank that needs the most: experts of other ranks take part in each."""
        needed = [len(mini_batch.micro_batches(self._settings.max_tokens)) for mini_batch in share.mini_batches]
        pairs = zip(share.mini_batches, self._peers.largest(needed), strict=True)
        return replace(share, mini_batches=tuple(replace(part, num_micro_batches=count) for part, count in pairs))
