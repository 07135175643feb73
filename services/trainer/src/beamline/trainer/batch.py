"""What a train step reads: trajectories, cut into mini-batches and packed into micro-batches.

Legend: T tokens of all trajectories of a micro-batch, L loss tokens among them; of routes, L layers and K experts a
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from beamline.algorithms import packing


@dataclass(frozen=True)
class Trajectory:
    """One sampled sequence with its advantage."""

    tokens: np.ndarray
    """int64: prompt, then response."""
    num_prompt_tokens: int
    loss_mask: np.ndarray
    """bool, one per response token."""
    rollout_logprobs: np.ndarray
    """float32, one per response token: the engine's."""
    advantage: float
    policy_versions: np.ndarray
    """int64, one per response token: the policy that it was sampled from."""
    data_source: int = 0
    """Index into `Batch.data_sources`."""
    routes: np.ndarray | None = None
    """uint8 or uint16 [tokens - 1, layers, experts a token]: the engine's choice; None is routed live."""
    weight: float = 1.0
    """Of each of its loss tokens in the mini-batch's loss, as the run's reduction says."""
    place: tuple[int, int] = (0, 0)
    """Its group in the batch, and its sample in the group."""

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


PADDING = Trajectory(
    tokens=np.zeros(1, np.int64),
    num_prompt_tokens=1,
    loss_mask=np.zeros(0, bool),
    rollout_logprobs=np.zeros(0, np.float32),
    advantage=0.0,
    policy_versions=np.zeros(0, np.int64),
)
"""One token outside all losses: what a rank computes in a micro-batch for which it has nothing."""


@dataclass(frozen=True)
class MicroBatch:
    """Trajectories laid end to end, without padding; one forward and backward."""

    tokens_T: np.ndarray
    """int64"""
    lengths: tuple[int, ...]
    """Tokens of each trajectory; they sum to T."""
    rows_L: np.ndarray
    """int64: the row of T whose output predicts the loss token, one before the token's own."""
    targets_L: np.ndarray
    """int64: the loss token."""
    rollout_logprobs_L: np.ndarray
    """float32"""
    advantages_L: np.ndarray
    """float32: the trajectory's, at each of its loss tokens."""
    weights_L: np.ndarray
    """float64: the trajectory's. A mini-batch's loss is the sum of weight x loss over its tokens, on all ranks."""
    policy_versions_L: np.ndarray
    """int64: the policy that each loss token was sampled from."""
    sequences_L: np.ndarray
    """int64: the trajectory of each loss token, an index into `lengths`."""
    places: tuple[tuple[int, int], ...]
    """Of each trajectory, `Trajectory.place`."""
    data_sources: tuple[int, ...]
    """Of each trajectory, indices into `Batch.data_sources`."""
    num_padding: int
    """Tokens of T that are there for other ranks' sake alone."""
    routes_TLK: np.ndarray | None
    """uint8 or uint16; None where no trajectory has routes."""
    routed_T: np.ndarray
    """bool: rows of routes_TLK that are there. A trajectory's last token, which predicts nothing, never has one."""

    @classmethod
    def of_tokens(cls, tokens: Sequence[int]) -> "MicroBatch":
        """One sequence of which every token but the first is a loss token."""
        rest = len(tokens) - 1
        sequence = Trajectory(
            tokens=np.asarray(tokens, np.int64),
            num_prompt_tokens=1,
            loss_mask=np.ones(rest, bool),
            rollout_logprobs=np.zeros(rest, np.float32),
            advantage=0.0,
            policy_versions=np.zeros(rest, np.int64),
        )
        return cls.pack([sequence])

    @classmethod
    def pack(cls, trajectories: Sequence[Trajectory]) -> "MicroBatch":
        lengths = tuple(len(t.tokens) for t in trajectories)
        starts = np.cumsum((0, *lengths))[:-1]
        rows = [
            start + t.num_prompt_tokens - 1 + np.flatnonzero(t.loss_mask)
            for start, t in zip(starts, trajectories, strict=True)
        ]
        sequences_L = np.repeat(np.arange(len(trajectories)), [t.num_loss_tokens for t in trajectories])
        rows_L, tokens_T = np.concatenate(rows), np.concatenate([t.tokens for t in trajectories])
        return cls(
            tokens_T=tokens_T,
            lengths=lengths,
            rows_L=rows_L,
            targets_L=tokens_T[rows_L + 1],
            rollout_logprobs_L=np.concatenate([t.rollout_logprobs[t.loss_mask] for t in trajectories]),
            advantages_L=np.array([t.advantage for t in trajectories], np.float32)[sequences_L],
            weights_L=np.array([t.weight for t in trajectories], np.float64)[sequences_L],
            policy_versions_L=np.concatenate([t.policy_versions[t.loss_mask] for t in trajectories]),
            sequences_L=sequences_L,
            places=tuple(t.place for t in trajectories),
            data_sources=tuple(t.data_source for t in trajectories),
            num_padding=sum(len(t.tokens) for t in trajectories if t is PADDING),
            routes_TLK=_pack_routes(trajectories, starts, len(tokens_T)),
            routed_T=np.concatenate([_routed(t) for t in trajectories]),
        )

    def live(self) -> "MicroBatch":
        """Without routes: a model that reads it chooses its own experts."""
        return replace(self, routes_TLK=None, routed_T=np.zeros_like(self.routed_T))


def _pack_routes(trajectories: Sequence[Trajectory], starts: np.ndarray, num_tokens: int) -> np.ndarray | None:
    there = [(start, t.routes) for start, t in zip(starts, trajectories, strict=True) if t.routes is not None]
    if not there:
        return None
    routes_TLK = np.zeros((num_tokens, *there[0][1].shape[1:]), there[0][1].dtype)
    for start, routes in there:
        routes_TLK[start : start + len(routes)] = routes
    return routes_TLK


def _routed(trajectory: Trajectory) -> np.ndarray:
    rows = np.full(len(trajectory.tokens), trajectory.routes is not None)
    rows[-1] = False
    return rows


@dataclass(frozen=True)
class MiniBatch:
    """This rank's trajectories of one optimizer update; it may have none where others do."""

    trajectories: tuple[Trajectory, ...]
    num_micro_batches: int = 1
    """At least so many, for another rank has them, and the ranks' layers meet in every micro-batch."""

    def micro_batches(self, max_tokens: int) -> list[MicroBatch]:
        """Few, evenly filled micro-batches of at most `max_tokens` tokens.

        How they are split never changes the gradient beyond rounding. Raises ValueError for a trajectory that is
        longer than the budget.
        """
        lengths = [len(t.tokens) for t in self.trajectories]
        parts = packing.micro_batches(lengths, max_tokens, self.num_micro_batches)
        return [MicroBatch.pack([self.trajectories[i] for i in part] or [PADDING]) for part in parts]


@dataclass(frozen=True)
class Group:
    """A prompt group of the batch."""

    group_id: str
    rewards: tuple[float | None, ...]
    """What its advantages are made of; all None where the group is left out."""


@dataclass(frozen=True)
class Batch:
    """Turns policy `step - 1` into policy `step`."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
    data_sources: tuple[str, ...]
    """Where the step's prompts come from; the same on every rank."""
    groups: tuple[Group, ...] = ()
    """Whose trajectories are dealt out; of all of them, as places count them."""
    failed_groups: dict[str, str] = field(default_factory=dict)
    """Groups of the step that are left out, by id: what is wrong with their blobs."""
