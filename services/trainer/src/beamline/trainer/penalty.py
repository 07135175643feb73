"""Divergence from the reference as a part of the reward: taken off before the advantages are made.

Legend: L loss tokens of a micro-batch, N trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from beamline.algorithms.advantage_check import batch_advantages
from beamline.algorithms.advantages import Advantage, Advantages
from beamline.algorithms.kl import KLPenalty
from beamline.trainer.batch import Group, MicroBatch
from beamline.trainer.peers import Arrays, Peers

type Plan = Sequence[Sequence[MicroBatch]]
"""Of each mini-batch, its micro-batches."""
type Columns = Sequence[Sequence[Tensor] | None]
"""Of each mini-batch, [L] per micro-batch."""


@dataclass(frozen=True)
class RewardPenalty:
    """Makes a step's advantages again, from rewards less what the trajectories' divergences cost."""

    kl: KLPenalty
    advantage: Advantage
    name: str
    """Of the advantage, for messages."""

    def take_off(
        self, groups: Sequence[Group], plan: Plan, old_logprobs: Columns, ref_logprobs: Columns, peers: Peers
    ) -> tuple[list[list[MicroBatch]], float]:
        """The plan with the new advantages, and the divergence summed over this rank's loss tokens.

        Every rank hears of all shares' trajectories and computes the same advantages. A trajectory that nobody reads,
        for it is left out of the loss, keeps the reward that the others are compared with.
        """
        own = [
            self._costs(micro_batch, old, ref)
            for micro_batches, olds, refs in zip(plan, old_logprobs, ref_logprobs, strict=True)
            for micro_batch, old, ref in zip(micro_batches, olds or (), refs or (), strict=True)
        ]
        places_N2, costs_N = (np.concatenate(columns) for columns in zip(*own, strict=True))
        shares = peers.gather({"places_N2": places_N2, "costs_N": costs_N})
        rewards = _less(groups, shares)
        advantages = batch_advantages(self.name, self.advantage, rewards, [group.group_id for group in groups])
        return [[_with(m, advantages) for m in row] for row in plan], float(costs_N.sum()) / self.kl.coefficient

    def _costs(self, micro_batch: MicroBatch, old_L: Tensor, ref_L: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Places, int64 [N, 2], and costs, float64 [N], of the trajectories that have loss tokens."""
        sequences_L = torch.from_numpy(micro_batch.sequences_L).to(old_L.device)
        costs_N = self.kl.of_trajectories(old_L, ref_L, sequences_L, len(micro_batch.lengths)).cpu().numpy()
        trained = np.unique(micro_batch.sequences_L)
        return np.array(micro_batch.places, np.int64)[trained], costs_N[trained]


def _less(groups: Sequence[Group], shares: Sequence[Arrays]) -> list[list[float | None]]:
    rewards = [list(group.rewards) for group in groups]
    for share in shares:
        for (group, sample), cost in zip(share["places_N2"].tolist(), share["costs_N"].tolist(), strict=True):
            reward = groups[group].rewards[sample]
            assert reward is not None, "what has no reward has no advantage, and no place in a batch"
            rewards[group][sample] = reward - cost
    return rewards


def _with(micro_batch: MicroBatch, advantages: Advantages) -> MicroBatch:
    own = [advantages[group][sample] for group, sample in micro_batch.places]
    advantages_L = np.array([0.0 if one is None else one for one in own], np.float32)[micro_batch.sequences_L]
    return replace(micro_batch, advantages_L=advantages_L)
