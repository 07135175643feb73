"""Trajectories and batches for the trainer's tests."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from beamline.algorithms.reductions import Reduction, token_mean
from beamline.trainer.batch import Batch, MiniBatch, Trajectory

DATA_SOURCES = ("sums", "words")


def trajectory(
    rng: np.random.Generator, vocab_size: int, num_prompt: int, num_response: int, policy_version: int = 0
) -> Trajectory:
    """Random tokens; about one response token in ten is no loss token."""
    loss_mask = rng.random(num_response) > 0.1
    loss_mask[0] = True
    return Trajectory(
        tokens=rng.integers(0, vocab_size, num_prompt + num_response),
        num_prompt_tokens=num_prompt,
        loss_mask=loss_mask,
        rollout_logprobs=rng.normal(-3, 0.5, num_response).astype(np.float32),
        advantage=float(rng.normal()),
        policy_versions=np.full(num_response, policy_version),
        data_source=int(rng.integers(len(DATA_SOURCES))),
    )


def mini_batch(trajectories: Sequence[Trajectory], reduction: Reduction = token_mean) -> MiniBatch:
    """All trajectories of a mini-batch, weighted; their groups are those of their places."""
    weights_N = reduction([t.num_loss_tokens for t in trajectories], [t.place[0] for t in trajectories], 64)
    return MiniBatch(tuple(replace(t, weight=w) for t, w in zip(trajectories, weights_N.tolist(), strict=True)))


def batch(step: int, vocab_size: int, num_mini_batches: int = 2, num_trajectories: int = 6, seed: int = 0) -> Batch:
    """Trajectories of 3 to 8 prompt and 4 to 40 response tokens."""
    rng = np.random.default_rng([seed, step])
    minis: list[MiniBatch] = []
    for _ in range(num_mini_batches):
        parts = [
            trajectory(rng, vocab_size, int(rng.integers(3, 9)), int(rng.integers(4, 41)), step - 1)
            for _ in range(num_trajectories)
        ]
        minis.append(mini_batch(parts))
    return Batch(step, tuple(minis), DATA_SOURCES)
