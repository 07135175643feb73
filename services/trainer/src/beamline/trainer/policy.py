"""The policy as the trainer sees it: a few verbs over one set of weights.

`megatron.policy.MegatronPolicy` is the real one; `fake_policy.FakePolicy` is a table small enough to check by hand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from beamline.algorithms.losses import PolicyLoss
from beamline.protocol.errors import BeamlineError
from beamline.trainer.batch import MicroBatch
from beamline.trainer.routing import RouteCounts
from beamline.trainer.weighted_loss import LossSums
from beamline.weights.tensors import Shard


class NotFinite(BeamlineError, ArithmeticError):
    """A loss or gradient norm that is NaN or infinite; no update was applied."""


class NotSaved(BeamlineError):
    """Files that could not be written; weights and optimizer are as they were."""


@dataclass(frozen=True)
class ForwardBackward:
    """What the forward passes of one mini-batch found, over this rank's loss tokens."""

    logprobs: list[torch.Tensor]
    """float32 [L] per micro-batch, detached."""
    sums: LossSums
    num_filler_tokens: int = 0
    """Computed beside the micro-batches' own, so that their rows can be split evenly."""


class Policy(Protocol):
    """Weights, their optimizer, and what can be done with them."""

    num_passes: int
    """Forward passes so far, each of one micro-batch; read by other threads."""

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Log-probability of every loss token at the run's temperature, float32 [L] per micro-batch; no gradient."""
        ...

    def reference_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """As `logprobs`, of the frozen reference: the weights with which the policy was made, for good.

        Routed live, also where the policy replays routes. Those are the policy's own choice of experts: forced through
        them the reference would be another model, the further the policy has moved the more so, and what was measured
        would be no divergence from it.
        """
        ...

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: Sequence[torch.Tensor] | None,
        loss: PolicyLoss,
        ref_logprobs: Sequence[torch.Tensor] | None = None,
    ) -> ForwardBackward:
        """Add the gradient of the mini-batch's loss, weighted as its micro-batches say.

        All micro-batches of a mini-batch come at once, so that pipeline stages can overlap them. No
        old_logprobs means that the weights are still those of the step's start: they are this forward's own.
        Raises NotFinite for a loss that is NaN or infinite.
        """
        ...

    def optimizer_step(self, lr: float) -> float:
        """Clip, update, clear the gradient; returns the gradient norm before clipping.

        Raises NotFinite, leaving weights and optimizer as they were, where the norm is NaN or infinite.
        """
        ...

    def take_route_counts(self) -> RouteCounts:
        """What replay did, over all ranks, since this was last asked; every rank has to ask.

        Each token is counted once a step: in `logprobs`, or in a `forward_backward` without old_logprobs.
        """
        ...

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens 1 to n-1, each given what precedes it, at temperature 1."""
        ...

    def shards(self, cuts: int, on_device: bool = False) -> Iterator[Shard]:
        """This rank's shards of the weights, as `shards.shards_of` says; those of all ranks make up the policy.

        Raises ConfigError: the model has a parameter that cannot be exported so.
        """
        ...

    def gradient_bytes(self) -> int:
        """Memory of this rank's gradients: none is held between an update and the next backward pass."""
        ...

    def save(self, directory: Path) -> None:
        """Write `policy`, `optimizer` and what else `load` needs into a checkpoint directory.

        Weights are held one file's worth at a time. Where a rank's disk fails it raises, after its part in what the
        ranks do together.
        """
        ...

    def save_weights(self, directory: Path) -> None:
        """Write `policy` alone, likewise."""
        ...

    def load(self, directory: Path) -> None:
        """Take weights and optimizer state from what `save` wrote. Raises WeightError where they do not fit."""
        ...
