"""What a train step reads: trajectories, cut into mini-batches and packed into micro-batches.

Legend: T tokens of all trajectories of a micro-batch, L loss tokens among them; of routes, L layers and K experts a
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    policy_versions_L: np.ndarray
    """int64: the policy that each loss token was sampled from."""
    sequences_L: np.ndarray
    """int64: the trajectory of each loss token, an index into `lengths`."""
    data_sources: tuple[int, ...]
    """Of each trajectory, indices into `Batch.data_sources`."""
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
            policy_versions_L=np.concatenate([t.policy_versions[t.loss_mask] for t in trajectories]),
            sequences_L=sequences_L,
            data_sources=tuple(t.data_source for t in trajectories),
            routes_TLK=_pack_routes(trajectories, starts, len(tokens_T)),
            routed_T=np.concatenate([_routed(t) for t in trajectories]),
        )


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
    """This rank's trajectories of one optimizer update.

    Raises ValueError for one without loss tokens: it would have no gradient.
    """

    trajectories: tuple[Trajectory, ...]
    num_loss_tokens: int
    """Of the whole mini-batch, over all ranks: the denominator of token_mean."""
    num_micro_batches: int = 1
    """At least so many, for another rank has them, and the ranks' layers meet in every micro-batch."""

    def __post_init__(self) -> None:
        if self.num_loss_tokens <= 0:
            raise ValueError(
                f"a mini-batch of {len(self.trajectories)} trajectories has no loss tokens: nothing to train"
            )

    def micro_batches(self, max_tokens: int) -> list[MicroBatch]:
        """Few, evenly filled micro-batches of at most `max_tokens` tokens.

        How they are split never changes the gradient beyond rounding. Raises ValueError for a trajectory that is
        longer than the budget.
        """
        lengths = [len(t.tokens) for t in self.trajectories]
        parts = packing.micro_batches(lengths, max_tokens, self.num_micro_batches)
        return [MicroBatch.pack([self.trajectories[i] for i in part] or [PADDING]) for part in parts]


@dataclass(frozen=True)
class Batch:
    """Turns policy `step - 1` into policy `step`."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
    data_sources: tuple[str, ...]
    """Where the step's prompts come from; the same on every rank."""
    failed_groups: dict[str, str] = field(default_factory=dict)
    """Groups of the step that are left out, by id: what is wrong with their blobs."""
