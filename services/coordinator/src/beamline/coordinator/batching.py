"""From scored groups to a train batch: filters, advantages, mini-batches, token-balanced ranks. Pure functions."""

from beamline.algorithms.advantages import grpo
from beamline.algorithms.filters import zero_variance
from beamline.algorithms.packing import balance
from beamline.protocol.algorithm_config import AlgorithmSection
from beamline.protocol.messages import MiniBatch, Place, ScoredGroup, TrainBatch, TrainGroup


def rewards(group: ScoredGroup) -> list[float | None]:
    """Shaped rewards; None where the grader abstained."""
    return [grade.reward for grade in group.grades]


def split_useless(groups: list[ScoredGroup], config: AlgorithmSection) -> tuple[list[str], list[str]]:
    """Group ids to keep and to filter: a group whose rewards are all equal has no gradient."""
    if not config.drop_zero_variance:
        return [group.group_id for group in groups], []
    useless = {group.group_id for group in groups if zero_variance(rewards(group))}
    kept = [group.group_id for group in groups if group.group_id not in useless]
    return kept, sorted(useless)


def train_batch(step: int, groups: list[ScoredGroup], config: AlgorithmSection, num_ranks: int) -> TrainBatch:
    """Advantages for each group, and the groups dealt to mini-batches in order of issue.

    A batch with fewer groups than mini-batches gets fewer mini-batches.
    """
    advantages = grpo([rewards(group) for group in groups], normalize_std=config.normalize_std)
    train_groups = [
        TrainGroup(
            group_id=group.group_id,
            data_source=group.task.data_source,
            trajectories=group.trajectories,
            routed_experts=group.routed_experts,
            advantages=advantages_G,
        )
        for group, advantages_G in zip(groups, advantages, strict=True)
    ]
    count = min(config.num_mini_batches, len(groups))
    shares = [range(i * len(groups) // count, (i + 1) * len(groups) // count) for i in range(count)]
    mini_batches = [_mini_batch(share, groups, train_groups, num_ranks) for share in shares]
    return TrainBatch(step=step, groups=train_groups, mini_batches=mini_batches)


def _mini_batch(share: range, groups: list[ScoredGroup], train_groups: list[TrainGroup], num_ranks: int) -> MiniBatch:
    places = [
        Place(group=group, sample=sample)
        for group in share
        for sample, advantage in enumerate(train_groups[group].advantages)
        if advantage is not None
    ]
    lengths = [groups[place.group].response_lengths[place.sample] for place in places]
    total = [groups[place.group].num_prompt_tokens + length for place, length in zip(places, lengths, strict=True)]
    ranks = [[places[i] for i in rank] for rank in balance(total, num_ranks)]
    return MiniBatch(num_loss_tokens=sum(lengths), ranks=ranks)
