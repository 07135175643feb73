"""The statistics of a train step, under the metric names of the run's summary."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from beamline.trainer.batch import MicroBatch
from beamline.trainer.policy import ForwardBackward


@dataclass
class StepStats:
    """Gathers sums while the step runs; `metrics()` reads them out once at its end."""

    lr: float
    _results: list[ForwardBackward] = field(default_factory=list)
    _grad_norms: list[float] = field(default_factory=list)
    _mismatches: list[np.ndarray] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _num_tokens: int = 0
    _num_micro_batches: int = 0

    def add_update(
        self,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: Sequence[torch.Tensor],
        result: ForwardBackward,
        grad_norm: float,
    ) -> None:
        self._results.append(result)
        self._grad_norms.append(grad_norm)
        for micro_batch, old in zip(micro_batches, old_logprobs, strict=True):
            self._mismatches.append(old.cpu().numpy() - micro_batch.rollout_logprobs_L)
            self._num_tokens += len(micro_batch.tokens_T)
        self._num_micro_batches += len(micro_batches)

    def add_time(self, part: str, started: float) -> None:
        """Add the seconds since `started`, a reading of time.perf_counter."""
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """Means are over loss tokens; loss and grad_norm are means over the step's updates.

        mismatch is old_logprobs - rollout_logprobs; mismatch_abs_mean is the gap to watch.
        """
        mismatch = np.concatenate(self._mismatches)
        gap = np.abs(mismatch)
        num_loss_tokens = len(mismatch)
        return {
            "policy/loss": float(np.mean([r.loss for r in self._results])),
            "policy/entropy": sum(r.entropy_sum for r in self._results) / num_loss_tokens,
            "policy/lr": self.lr,
            "policy/grad_norm": float(np.mean(self._grad_norms)),
            "policy/grad_norm_max": max(self._grad_norms),
            "policy/clip_ratio": sum(r.num_clipped for r in self._results) / num_loss_tokens,
            "policy/ratio_mean": sum(r.ratio_sum for r in self._results) / num_loss_tokens,
            "policy/mismatch_mean": float(mismatch.mean()),
            "policy/mismatch_abs_mean": float(gap.mean()),
            "policy/mismatch_abs_p99": float(np.quantile(gap, 0.99)),
            "policy/mismatch_abs_max": float(gap.max()),
            "policy/num_updates": float(len(self._results)),
            "policy/num_micro_batches": float(self._num_micro_batches),
            "tokens/trained": float(self._num_tokens),
            "tokens/loss": float(num_loss_tokens),
            **{f"timing/train_{part}": seconds for part, seconds in self._seconds.items()},
        }
