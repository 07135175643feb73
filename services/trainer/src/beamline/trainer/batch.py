"""What a train step reads: trajectories, cut into mini-batches and packed into micro-batches.

Legend: T tokens of all trajectories of a micro-batch, L loss tokens among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


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

    @classmethod
    def of_tokens(cls, tokens: Sequence[int]) -> "MicroBatch":
        """One sequence of which every token but the first is a loss token."""
        rest = len(tokens) - 1
        zeros = np.zeros(rest, np.float32)
        return cls.pack([Trajectory(np.asarray(tokens, np.int64), 1, np.ones(rest, bool), zeros, 0.0)])

    @classmethod
    def pack(cls, trajectories: Sequence[Trajectory]) -> "MicroBatch":
        lengths = tuple(len(t.tokens) for t in trajectories)
        starts = np.cumsum((0, *lengths))[:-1]
        rows = [
            start + t.num_prompt_tokens - 1 + np.flatnonzero(t.loss_mask)
            for start, t in zip(starts, trajectories, strict=True)
        ]
        rows_L, tokens_T = np.concatenate(rows), np.concatenate([t.tokens for t in trajectories])
        return cls(
            tokens_T=tokens_T,
            lengths=lengths,
            rows_L=rows_L,
            targets_L=tokens_T[rows_L + 1],
            rollout_logprobs_L=np.concatenate([t.rollout_logprobs[t.loss_mask] for t in trajectories]),
            advantages_L=np.repeat(
                np.array([t.advantage for t in trajectories], np.float32), [t.num_loss_tokens for t in trajectories]
            ),
        )


@dataclass(frozen=True)
class MiniBatch:
    """This rank's trajectories of one optimizer update.

    Raises ValueError for one without loss tokens: it would have no gradient.
    """

    trajectories: tuple[Trajectory, ...]
    num_loss_tokens: int
    """Of the whole mini-batch, over all ranks: the denominator of token_mean."""

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
        parts = packing.micro_batches([len(t.tokens) for t in self.trajectories], max_tokens)
        return [MicroBatch.pack([self.trajectories[i] for i in part]) for part in parts]


@dataclass(frozen=True)
class Batch:
    """Turns policy `step - 1` into policy `step`."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
