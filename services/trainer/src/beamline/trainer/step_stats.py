"""The statistics of a train step, under the metric names of the run's summary.

Legend: L loss tokens, N trajectories, U optimizer updates, R data-parallel ranks.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import MicroBatch
from beamline.trainer.mismatch import mismatch_metrics
from beamline.trainer.policy import ForwardBackward
from beamline.trainer.routing import RouteCounts
from beamline.trainer.weighted_loss import LossSums

type Parts = Mapping[str, np.ndarray]
"""One rank's share of a step's statistics; the same names and types on every rank.

    mismatch_L      float32, old_logprobs - rollout_logprobs
    staleness_L     int64, versions between the policy that sampled the token and the one at the step's start
    sources_L       int64, indices into the batch's data sources
    num_tokens_N    int64, of each trajectory with loss tokens; trajectories follow each other in the columns above
    sums_U          float64 [U, 7], each update's `LossSums`
    work_U          int64 [U, 3], each update's `Work`
    penalty_sum     float64 [1], divergence that was taken off rewards
"""
COLUMNS = ("mismatch_L", "staleness_L", "sources_L", "num_tokens_N")
"""What merges by laying ranks end to end; everything else is summed."""


class Work(NamedTuple):
    """What a rank computed for an update."""

    tokens: int
    """Of the batch."""
    padding: int
    """Computed beside them: in micro-batches for which the rank has nothing, and to split rows evenly."""
    micro_batches: int


@dataclass
class StepStats:
    """Gathers sums while the step runs; `metrics()` reads them out once at its end."""

    step: int
    data_sources: Sequence[str]
    loss: PolicyLoss
    lr: float
    _sums: list[LossSums] = field(default_factory=list)
    _work: list[Work] = field(default_factory=list)
    _grad_norms: list[float] = field(default_factory=list)
    _columns: list[dict[str, np.ndarray]] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _penalty: float | None = None
    _routing: dict[str, float] = field(default_factory=dict)

    def add_update(
        self,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: Sequence[torch.Tensor],
        result: ForwardBackward,
        grad_norm: float,
    ) -> None:
        self._sums.append(result.sums)
        self._grad_norms.append(grad_norm)
        for micro_batch, old in zip(micro_batches, old_logprobs, strict=True):
            self._columns.append(self._columns_of(micro_batch, old.cpu().numpy()))
        num_padding = sum(m.num_padding for m in micro_batches)
        num_tokens = sum(len(m.tokens_T) for m in micro_batches) - num_padding
        self._work.append(Work(num_tokens, num_padding + result.num_filler_tokens, len(micro_batches)))

    def add_penalty(self, kl: float) -> None:
        """Add the divergence, summed over this rank's loss tokens, that was taken off rewards."""
        self._penalty = kl

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
        return {
            **found,
            "sums_U": np.array(self._sums, np.float64),
            "work_U": np.array(self._work, np.int64),
            "penalty_sum": np.array([self._penalty or 0.0]),
        }

    def metrics(self) -> dict[str, float]:
        """The metrics of a step of one data-parallel rank."""
        return self.metrics_of([self.parts()])

    def metrics_of(self, parts_R: Sequence[Parts]) -> dict[str, float]:
        """The metrics of a step, from every data-parallel rank's parts; exact, quantiles included.

        Means are over loss tokens; losses and grad_norm are means over the step's updates. mismatch_abs_mean is the gap
        to watch. What all ranks know alike (gradient norms, routing, learning rate) and the times are this rank's.
        """
        parts = {name: _merged(name, [p[name] for p in parts_R]) for name in parts_R[0]}
        mismatch_L, num_tokens_N = parts["mismatch_L"], parts["num_tokens_N"]
        num_loss_tokens = len(mismatch_L)
        sums_U = LossSums(*parts["sums_U"].T)
        work = Work(*parts["work_U"].sum(0).tolist())
        sequences_L = torch.from_numpy(np.repeat(np.arange(len(num_tokens_N)), num_tokens_N))
        off_policy = self.loss.off_policy.metrics(torch.from_numpy(mismatch_L), sequences_L, len(num_tokens_N))
        return {
            "policy/loss": float(np.mean(sums_U.loss)),
            "policy/entropy": float(np.sum(sums_U.entropy)) / num_loss_tokens,
            "policy/lr": self.lr,
            "policy/grad_norm": float(np.mean(self._grad_norms)),
            "policy/grad_norm_max": max(self._grad_norms),
            "policy/clip_ratio": float(np.sum(sums_U.clipped)) / num_loss_tokens,
            "policy/ratio_mean": float(np.sum(sums_U.ratio)) / num_loss_tokens,
            **self._terms(sums_U, float(parts["penalty_sum"][0]), num_loss_tokens),
            **mismatch_metrics(mismatch_L, parts["staleness_L"], parts["sources_L"], self.data_sources),
            **{f"off_policy/{name}": value for name, value in off_policy.items()},
            "policy/num_updates": float(len(self._sums)),
            "policy/num_micro_batches": float(work.micro_batches),
            "packing/waste": work.padding / (work.tokens + work.padding),
            "packing/heaviest_rank": _heaviest_rank([p["work_U"] for p in parts_R]),
            "tokens/trained": float(work.tokens),
            "tokens/loss": float(num_loss_tokens),
            **self._routing,
            **{f"timing/train_{part}": seconds for part, seconds in self._seconds.items()},
        }

    def _terms(self, sums_U: LossSums, penalty_sum: float, num_loss_tokens: int) -> dict[str, float]:
        """What the loss has beside the surrogate, and only that."""
        found: dict[str, float] = {}
        if self._penalty is not None:
            found["policy/kl"] = penalty_sum / num_loss_tokens
        if self.loss.kl is not None:
            found["policy/kl"] = float(np.sum(sums_U.kl)) / num_loss_tokens
            found["loss/kl"] = float(np.mean(sums_U.kl_loss))
        if self.loss.entropy_coefficient:
            found["loss/entropy"] = float(np.mean(sums_U.entropy_loss))
        return found

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


def _heaviest_rank(work_RU: Sequence[np.ndarray]) -> float:
    """Tokens of each update's heaviest rank, for which the others wait, as a multiple of the mean."""
    num_tokens_RU = np.stack(work_RU)[..., :2].sum(-1)
    return float(num_tokens_RU.max(0).sum() / num_tokens_RU.mean(0).sum())
