"""How far the trainer is from the engine, over a step's loss tokens; exact, from the tokens of all ranks.

Legend: L loss tokens.
"""

from collections.abc import Sequence

import numpy as np

LARGE = 0.1
"""A mismatch of more nats than this moves a token's ratio by more than a tenth."""


def mismatch_metrics(
    mismatch_L: np.ndarray, staleness_L: np.ndarray, sources_L: np.ndarray, data_sources: Sequence[str]
) -> dict[str, float]:
    """The gap under the metric names of the run's summary, whole, by data source and by staleness.

    Args:
        mismatch_L: old_logprobs - rollout_logprobs, at least one.
        staleness_L: policy versions between the policy that sampled a token and the one at the step's start.
        sources_L: indices into `data_sources`.
    """
    gap_L = np.abs(mismatch_L.astype(np.float64))
    p50, p99 = np.quantile(gap_L, (0.5, 0.99))
    found = {
        "policy/mismatch_mean": float(mismatch_L.mean(dtype=np.float64)),
        "policy/mismatch_abs_mean": float(gap_L.mean()),
        "policy/mismatch_abs_p50": float(p50),
        "policy/mismatch_abs_p99": float(p99),
        "policy/mismatch_abs_max": float(gap_L.max()),
        "policy/mismatch_large": float((gap_L > LARGE).mean()),
    }
    for source in np.unique(sources_L):
        found[f"policy/mismatch_abs_mean/{data_sources[source]}"] = float(gap_L[sources_L == source].mean())
    for staleness in np.unique(staleness_L):
        found[f"policy/mismatch_abs_mean_at_staleness/{staleness}"] = float(gap_L[staleness_L == staleness].mean())
    return found
