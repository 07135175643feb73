"""The statistics of a train step, under the metric names of the run's summary.

Legend: L loss tokens, N trajectories, U optimizer updates, R data-parallel ranks.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from beamline.algorithms.off_policy import OffPolicy
from beamline.trainer.batch import MicroBatch
from beamline.trainer.mismatch import mismatch_metrics
from beamline.trainer.policy import ForwardBackward
from beamline.trainer.routing import RouteCounts

type Parts = Mapping[str, np.ndarray]
"""One rank's share of a step's statistics; the same names and types on every rank.

    mismatch_L      float32, old_logprobs - rollout_logprobs
    staleness_L     int64, versions between the policy that sampled the token and the one at the step's start
    sources_L       int64, indices into the batch's data sources
    num_tokens_N    int64, of each trajectory with loss tokens; trajectories follow each other in the columns above
    losses_U        float64, the rank's summand of each update's loss
    sums            float64 [5]: entropy, ratio, clipped tokens, tokens, micro-batches
"""
COLUMNS = ("mismatch_L", "staleness_L", "sources_L", "num_tokens_N")
"""What merges by laying ranks end to end; everything else is summed."""


@dataclass
class StepStats:
    """Gathers sums while the step runs; `metrics()` reads them out once at its end."""

    step: int
    data_sources: Sequence[str]
    off_policy: OffPolicy
    lr: float
    _results: list[ForwardBackward] = field(default_factory=list)
    _grad_norms: list[float] = field(default_factory=list)
    _columns: list[dict[str, np.ndarray]] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _num_tokens: int = 0
    _num_micro_batches: int = 0
    _routing: dict[str, float] = field(default_factory=dict)

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
            self._columns.append(self._columns_of(micro_batch, old.cpu().numpy()))
            # One without loss tokens is padding, in which this rank only keeps the others company.
            self._num_tokens += len(micro_batch.tokens_T) if len(micro_batch.rows_L) else 0
        self._num_micro_batches += len(micro_batches)

    def add_time(self, part: str, started: float) -> None:
        """Add the seconds since `started`, a reading of time.perf_counter."""
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started

    def add_routing(self, counts: RouteCounts) -> None:
        """Add what replay did in the step, over all ranks."""
        self._routing = counts.metrics()

    def parts(self) -> Parts:
        """This rank's share, for `metrics_of` on the rank that reports."""
        empty = {"mismatch_L": np.zeros(0, np.float32), **{name: np.zeros(0, np.int64) for name in COLUMNS[1:]}}
        found = {name: np.concatenate([c[name] for c in (empty, *self._columns)]) for name in COLUMNS}
        sums = [
            sum(r.entropy_sum for r in self._results),
            sum(r.ratio_sum for r in self._results),
            sum(r.num_clipped for r in self._results),
            self._num_tokens,
            self._num_micro_batches,
        ]
        return {**found, "losses_U": np.array([r.loss for r in self._results]), "sums": np.array(sums, np.float64)}

    def metrics(self) -> dict[str, float]:
        """The metrics of a step of one data-parallel rank."""
        return self.metrics_of([self.parts()])

    def metrics_of(self, parts_R: Sequence[Parts]) -> dict[str, float]:
        """The metrics of a step, from every data-parallel rank's parts; exact, quantiles included.

        Means are over loss tokens; loss and grad_norm are means over the step's updates. mismatch_abs_mean is the gap
        to watch. What all ranks know alike (gradient norms, routing, learning rate) and the times are this rank's.
        """
        parts = {name: _merged(name, [p[name] for p in parts_R]) for name in parts_R[0]}
        mismatch_L, num_tokens_N = parts["mismatch_L"], parts["num_tokens_N"]
        num_loss_tokens = len(mismatch_L)
        entropy, ratio, num_clipped, num_tokens, num_micro_batches = parts["sums"].tolist()
        sequences_L = torch.from_numpy(np.repeat(np.arange(len(num_tokens_N)), num_tokens_N))
        off_policy = self.off_policy.metrics(torch.from_numpy(mismatch_L), sequences_L, len(num_tokens_N))
        return {
            "policy/loss": float(parts["losses_U"].mean()),
            "policy/entropy": entropy / num_loss_tokens,
            "policy/lr": self.lr,
            "policy/grad_norm": float(np.mean(self._grad_norms)),
            "policy/grad_norm_max": max(self._grad_norms),
            "policy/clip_ratio": num_clipped / num_loss_tokens,
            "policy/ratio_mean": ratio / num_loss_tokens,
            **mismatch_metrics(mismatch_L, parts["staleness_L"], parts["sources_L"], self.data_sources),
            **{f"off_policy/{name}": value for name, value in off_policy.items()},
            "policy/num_updates": float(len(self._results)),
            "policy/num_micro_batches": num_micro_batches,
            "tokens/trained": num_tokens,
            "tokens/loss": float(num_loss_tokens),
            **self._routing,
            **{f"timing/train_{part}": seconds for part, seconds in self._seconds.items()},
        }

    def _columns_of(self, micro_batch: MicroBatch, old_logprobs_L: np.ndarray) -> dict[str, np.ndarray]:
        sequences_L = micro_batch.sequences_L
        return {
            "mismatch_L": (old_logprobs_L - micro_batch.rollout_logprobs_L).astype(np.float32),
            "staleness_L": self.step - 1 - micro_batch.policy_versions_L,
            "sources_L": np.array(micro_batch.data_sources, np.int64)[sequences_L],
            "num_tokens_N": np.unique_counts(sequences_L).counts,
        }


def _merged(name: str, arrays_R: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays_R) if name in COLUMNS else np.sum(arrays_R, axis=0)
