"""A loss of one's own: the policy is held back by a penalty in place of a clip. The trainer imports this file.

algorithm:
  loss: examples.own_loss:penalised
"""

import torch
from torch import Tensor

from beamline.algorithms.losses import Clip, TokenLoss

PENALTY = 2.0


def penalised(
    logprobs_L: Tensor,
    old_logprobs_L: Tensor,
    advantages_L: Tensor,
    sequence_L: Tensor,
    num_sequences: int,
    clip: Clip,
) -> TokenLoss:
    """-ratio A + PENALTY / 2 x (logprobs - old_logprobs)^2 at each token."""
    log_ratio_L = (logprobs_L - old_logprobs_L).clamp(-20, 20)
    ratio_L = log_ratio_L.exp()
    loss_L = -ratio_L * advantages_L + PENALTY / 2 * log_ratio_L.square()
    return TokenLoss(loss_L, ratio_L.detach(), torch.zeros_like(ratio_L, dtype=torch.bool))
