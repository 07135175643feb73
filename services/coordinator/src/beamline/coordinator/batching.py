"""From scored groups to a train batch: filters, advantages, mini-batches, token-balanced ranks. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from beamline.algorithms.advantage_check import AdvantageError, batch_advantages
from beamline.algorithms.advantages import ADVANTAGES, Advantage, Advantages, grpo
from beamline.algorithms.filters import zero_variance
from beamline.algorithms.packing import balance
from beamline.protocol.algorithm_config import AlgorithmSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import FinishReason, MiniBatch, Place, ScoredGroup, TrainBatch, TrainGroup
from beamline.runtime.plugins import load_plugin


def advantage_of(config: AlgorithmSection) -> Advantage:
    """The one that the recipe names. Raises ConfigError where a user's own cannot be loaded."""
    if config.advantage == "grpo":
        return partial(grpo, normalize_std=config.normalize_std)
    return ADVANTAGES.get(config.advantage) or load_plugin("algorithm.advantage", config.advantage)


def rewards(group: ScoredGroup) -> list[float | None]:
    """Shaped rewards; None where the grader abstained."""
    return [grade.reward for grade in group.grades]


def raw_rewards(group: ScoredGroup) -> list[float | None]:
    """Rewards before the overlong penalty; None where the grader abstained."""
    return [None if grade.reward is None else grade.breakdown.get("raw", grade.reward) for grade in group.grades]


@dataclass(frozen=True)
class Batcher:
    """Composes a run's batches.

    Args:
        groups_per_step: groups that a batch should hold.
        num_ranks: data-parallel ranks of the trainer.
    """

    config: AlgorithmSection
    advantage: Advantage
    groups_per_step: int
    num_ranks: int

    def is_useless(self, group: ScoredGroup) -> bool:
        """Whether nothing can be learned from the group: no trajectory is left, or its rewards do not differ.

        Dynamic sampling decides on raw rewards, the zero-variance filter on those that the advantages are made of.
        """
        if not any(self._is_trained(group, sample) for sample in range(len(group.grades))):
            return True
        if self.config.dynamic_sampling.mode != "none" and zero_variance(raw_rewards(group)):
            return True
        return self.config.filters_zero_variance and zero_variance(rewards(group))

    def split(self, groups: Sequence[ScoredGroup]) -> tuple[list[str], list[str]]:
        """Group ids to keep and to filter."""
        useless = {group.group_id for group in groups if self.is_useless(group)}
        return [group.group_id for group in groups if group.group_id not in useless], sorted(useless)

    def train_batch(self, step: int, groups: Sequence[ScoredGroup], traceparents: Mapping[str, str] = {}) -> TrainBatch:
        """Advantages of the groups, and the groups dealt to mini-batches in order of issue.

        A batch with fewer groups than mini-batches gets fewer mini-batches. With `replace`, groups stand in it again
        from the first on until it is full.

        Raises:
            ConfigError: a reward is not finite, or a user's own function raised or answered what cannot be trained.
        """
        advantages = self._advantages(groups)
        penalised = self.config.kl.coefficient > 0 and self.config.kl.place == "reward"
        train_groups = [
            TrainGroup(
                group_id=group.group_id,
                data_source=group.task.data_source,
                trajectories=group.trajectories,
                routed_experts=group.routed_experts,
                advantages=advantages_G,
                rewards=rewards(group) if penalised else [],
                traceparent=traceparents.get(group.group_id, ""),
            )
            for group, advantages_G in zip(groups, advantages, strict=True)
        ]
        order = list(range(len(groups)))
        if self.config.dynamic_sampling.mode == "replace":
            order += [i % len(groups) for i in range(self.groups_per_step - len(groups))]
        count = min(self.config.num_mini_batches, len(order))
        shares = [order[i * len(order) // count : (i + 1) * len(order) // count] for i in range(count)]
        return TrainBatch(
            step=step,
            groups=train_groups,
            mini_batches=[self._mini_batch(share, groups, train_groups) for share in shares],
        )

    def _advantages(self, groups: Sequence[ScoredGroup]) -> Advantages:
        """Made of all rewards; None for what takes no part in the loss."""
        ids = [group.group_id for group in groups]
        try:
            made = batch_advantages(self.config.advantage, self.advantage, [rewards(group) for group in groups], ids)
        except AdvantageError as error:
            raise ConfigError(str(error)) from error
        return [
            [advantage if self._is_trained(group, sample) else None for sample, advantage in enumerate(advantages_G)]
            for group, advantages_G in zip(groups, made, strict=True)
        ]

    def _is_trained(self, group: ScoredGroup, sample: int) -> bool:
        """A trajectory that was graded, and that overlong filtering leaves in the loss."""
        stopped = group.finish_reasons[sample] is FinishReason.STOP
        return group.grades[sample].reward is not None and (stopped or not self.config.overlong_filtering)

    def _mini_batch(
        self, share: Sequence[int], groups: Sequence[ScoredGroup], train_groups: Sequence[TrainGroup]
    ) -> MiniBatch:
        places = [
            Place(group=group, sample=sample)
            for group in share
            for sample, advantage in enumerate(train_groups[group].advantages)
            if advantage is not None
        ]
        lengths = [groups[p.group].num_prompt_tokens + groups[p.group].response_lengths[p.sample] for p in places]
        ranks = [[places[i] for i in rank] for rank in balance(lengths, self.num_ranks)]
        return MiniBatch(ranks=ranks)
