"""Gradients over the ranks: sums, because every loss is already divided by the mini-batch's global token count."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

Named = list[tuple[str, Tensor]]
"""Parameters by Megatron name; each `.grad` is this rank's."""


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert: those are spread over other groups than the rest."""
    return ".experts." in name


def sum_over_ranks(parameters: Named, groups: ProcessGroupCollection) -> None:
    """Complete every gradient: over data-parallel ranks, and over tensor-parallel ones where each saw a part.

    A parameter that got none has one of zeros, so that all take the same steps in every layout.

    A norm's or router's weight is whole on each tensor-parallel rank, which saw only its rows (sequence
    parallelism). Experts are not split by tensor parallelism: their replicas form the expert data group.
    """
    for _, p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
    dense = [p for name, p in parameters if not is_expert(name)]
    _all_reduce(dense, groups.dp_cp)
    _all_reduce([p for p in dense if getattr(p, "sequence_parallel", False)], groups.tp)
    _all_reduce([p for name, p in parameters if is_expert(name)], groups.expt_dp)


def norm(parameters: Named, groups: ProcessGroupCollection) -> float:
    """L2 norm of the whole model's gradient, each parameter counted once."""
    first_of_tp = groups.tp.rank() == 0
    dense = [
        p
        for name, p in parameters
        if not is_expert(name) and (first_of_tp or getattr(p, "tensor_model_parallel", False))
    ]
    dense_squares = _sum_of_squares(dense)
    expert_squares = _sum_of_squares([p for name, p in parameters if is_expert(name)])
    for value, members in ((dense_squares, (groups.tp, groups.pp)), (expert_squares, (groups.ep, groups.pp))):
        for group in members:
            if group.size() > 1:
                dist.all_reduce(value, group=group)
    return math.sqrt(float(dense_squares + expert_squares))


def scale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def _sum_of_squares(parameters: list[Tensor]) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([grad.norm() for grad in grads]).double().square().sum()


def _all_reduce(parameters: list[Tensor], group: Any) -> None:
    """Sum gradients over a group in one call."""
    if group.size() == 1 or not parameters:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for p, part in zip(parameters, flat.split([grad.numel() for grad in grads]), strict=True):
        p.grad = part.view_as(p)
