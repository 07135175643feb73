"""Inputs of the head's tests, the same in every process."""

import torch
from torch import Tensor

from beamline.trainer.megatron.head import Head

NUM_ENTRIES, HIDDEN = 50, 16
BORDERS = (0, NUM_ENTRIES // 2 - 1, NUM_ENTRIES // 2, NUM_ENTRIES - 1)
"""Of the vocabulary and of its halves."""

CASES = {
    "plain": Head(1.0, entropy_gradient=True),
    "T 0.7": Head(0.7, entropy_gradient=True),
    "softcap": Head(1.0, softcap=4.0, entropy_gradient=True),
    "softcap, T 0.7": Head(0.7, softcap=4.0, entropy_gradient=True),
}

Tensors = dict[str, Tensor]


def inputs(num_rows: int, scale: float = 1.0) -> Tensors:
    """hidden and weight, which want gradients, targets, and the gradients of both results.

    Scores have a standard deviation of about `scale`. The first targets are the borders.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator)
    weight = torch.randn(NUM_ENTRIES, HIDDEN, generator=generator) * (scale / HIDDEN**0.5)
    targets = torch.randint(NUM_ENTRIES, (num_rows,), generator=generator)
    num_borders = min(num_rows, len(BORDERS))
    targets[:num_borders] = torch.tensor(BORDERS[:num_borders])
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "targets": targets,
        "grad.logprobs": torch.randn(num_rows, generator=generator),
        "grad.entropy": torch.randn(num_rows, generator=generator),
    }
