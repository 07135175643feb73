"""Every metric of a run: name, unit, owner, kind and meaning. docs/metrics.md and deploy/ are made from it.

Names are of the whole run: a number that several workers have, each its own, ends in the worker's name.
"""

from collections import Counter
from functools import lru_cache

from beamline.protocol.metric_row import Kind, Metric
from beamline.protocol.ring_metrics import RING_METRICS
from beamline.protocol.service_metrics import SERVICE_METRICS
from beamline.protocol.trainer_metrics import TRAINER_METRICS

__all__ = ["METRICS", "Kind", "Metric", "find", "prometheus_name", "prometheus_sample"]

METRICS: tuple[Metric, ...] = (*RING_METRICS, *TRAINER_METRICS, *SERVICE_METRICS)
"""Where two rows describe a name, the first one is meant."""

_SHARED = {plain for plain, times in Counter(metric.plain for metric in METRICS).items() if times > 1}


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The row that describes a metric's name, if one does."""
    return next((metric for metric in METRICS if metric.match(name) is not None), None)


def prometheus_name(metric: Metric) -> str:
    """A row's name in Prometheus: `beamline_sync_canary_gap` for `sync/canary_gap/<worker>`.

    Where a total and its parts would be called alike, the parts are `..._by_<label>`.
    """
    by = f"_by_{metric.labels[-1]}" if metric.labels and metric.plain in _SHARED else ""
    return f"beamline_{metric.plain}{by}"


def prometheus_sample(name: str) -> tuple[str, dict[str, str]] | None:
    """What a number is called in Prometheus, with its labels; None for a name that the schema does not have."""
    metric = find(name)
    return None if metric is None else (prometheus_name(metric), metric.match(name) or {})
