"""A micro-batch's loss: what the policy loss says of each token, summed with the weights of the run's reduction.

The weights are of the whole mini-batch, on all ranks, so no split into micro-batches or over ranks changes the sum.
Legend: L loss tokens of a micro-batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import MicroBatch


class LossSums(NamedTuple):
    """Sums over loss tokens: three of weighted losses, and four that are divided by the number of tokens."""

    loss: float
    """All that was minimised."""
    kl_loss: float
    """The divergence's share of it."""
    entropy_loss: float
    """The entropy bonus's share of it; not above 0."""
    kl: float
    entropy: float
    ratio: float
    clipped: float


def weighted_loss(
    policy_loss: PolicyLoss,
    micro_batch: MicroBatch,
    logprobs_L: Tensor,
    entropy_L: Tensor,
    old_logprobs_L: Tensor | None,
    ref_logprobs_L: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The micro-batch's part of the mini-batch's loss, a scalar with gradient, and its `LossSums`, float64 [7].

    No old_logprobs_L means that they are logprobs_L.
    """
    columns = (micro_batch.rollout_logprobs_L, micro_batch.advantages_L, micro_batch.sequences_L)
    rollout_L, advantages_L, sequences_L = (torch.from_numpy(column).to(logprobs_L.device) for column in columns)
    found = policy_loss(
        logprobs_L,
        logprobs_L.detach() if old_logprobs_L is None else old_logprobs_L,
        rollout_L,
        advantages_L,
        sequences_L,
        len(micro_batch.lengths),
        reference_logprobs_L=ref_logprobs_L,
        entropy_L=entropy_L,
    )
    weights_L = torch.from_numpy(micro_batch.weights_L).to(logprobs_L)
    loss = (weights_L * found.loss_L).sum()
    kl_L = torch.zeros_like(weights_L) if found.kl_L is None else found.kl_L
    kl_coefficient = 0.0 if policy_loss.kl is None else policy_loss.kl.coefficient
    in_order = (
        loss,
        kl_coefficient * (weights_L * kl_L).sum(),
        -policy_loss.entropy_coefficient * (weights_L * entropy_L).sum(),
        kl_L.sum(),
        entropy_L.sum(),
        found.ratio_L.sum(),
        found.clipped_L.sum(),
    )
    return loss, torch.stack([value.detach().double() for value in in_order])
