"""Which rank looks after a parameter's state: one of those that hold the same parameter, so that none is kept twice.

Replicas of a dense parameter form the data-parallel group, those of an expert the expert data group. A norm or router
that every tensor-parallel rank holds whole has an owner in each one's data-parallel group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from beamline.trainer.megatron.buckets import buckets_of
from beamline.trainer.megatron.gradients import is_expert

FLAT_BYTES = 256 * 1024**2
"""Weights that one broadcast carries, counted as float32."""

type Parameters = Mapping[str, nn.Parameter]


def share_out(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Name -> rank: the largest first, each to the rank that has the least, the first such one.

    Sums of two ranks differ by no more than the largest size.
    """
    loads = [0] * num_ranks
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


@dataclass(frozen=True)
class Replicas:
    """Parameters that all ranks of a group hold, and which of them owns what."""

    group: Any
    parameters: Parameters

    @cached_property
    def owners(self) -> dict[str, int]:
        return share_out({name: p.numel() for name, p in self.parameters.items()}, self.group.size())

    def of(self, rank: int) -> dict[str, nn.Parameter]:
        """What a rank of the group owns, in the model's order."""
        return {name: p for name, p in self.parameters.items() if self.owners[name] == rank}

    def spread(self) -> None:
        """Every owner's weights go to the others."""
        if self.group.size() == 1:
            return
        for owner in range(self.group.size()):
            owned = self.of(owner)
            for names in buckets_of(owned, FLAT_BYTES):
                self._broadcast([owned[name].data for name in names], owner)

    def _broadcast(self, weights: list[Tensor], owner: int) -> None:
        parts = [weight.view(-1).view(torch.uint8) for weight in weights]  # a bfloat16 model has float32 routers
        flat = torch.cat(parts)
        dist.broadcast(flat, group=self.group, group_src=owner)
        if self.group.rank() != owner:
            for part, arrived in zip(parts, flat.split([len(part) for part in parts]), strict=True):
                part.copy_(arrived)


class Owners:
    """All parameters of this rank, of which `own` are those whose state it keeps."""

    def __init__(self, parameters: Parameters, groups: ProcessGroupCollection) -> None:
        dense = {name: p for name, p in parameters.items() if not is_expert(name)}
        experts = {name: p for name, p in parameters.items() if is_expert(name)}
        self._replicas = (Replicas(groups.dp_cp, dense), Replicas(groups.expt_dp, experts))
        mine = [replicas.of(replicas.group.rank()) for replicas in self._replicas]
        self.own = {name: p for name, p in parameters.items() if any(name in part for part in mine)}

    def spread(self) -> None:
        """Every rank gets from the owners the weights that it does not own; all ranks call it."""
        for replicas in self._replicas:
            replicas.spread()
