"""What the dashboard shows, by the names of the metric schema. A name that the schema lacks is refused."""

from collections.abc import Sequence
from dataclasses import dataclass

from beamline.protocol.metric_schema import METRICS, Metric, prometheus_name

RUN = 'run=~"$run"'
"""Chooses the dashboard's run; the scrape configuration gives every target its run's name."""
UNITS = {"s": "s", "bytes": "bytes", "share": "percentunit", "tokens/s": "none", "nats": "none"}
"""Grafana's names of units; others are shown as plain numbers."""


def row(name: str) -> Metric:
    """The schema's row of that name. Raises SystemExit where it has none."""
    found = next((metric for metric in METRICS if metric.name == name), None)
    if found is None:
        raise SystemExit(f"{name} is not in the metric schema: the panel or rule that names it must change with it")
    return found


@dataclass(frozen=True)
class Panel:
    """A chart of some metrics, one line each, or one each label where a metric has labels."""

    title: str
    metrics: Sequence[str]
    stacked: bool = False
    logarithmic: bool = False
    bound: float | None = None
    """Drawn as a threshold: the alert's."""

    @property
    def unit(self) -> str:
        units = {row(name).unit for name in self.metrics}
        return UNITS.get(units.pop(), "none") if len(units) == 1 else "none"

    @property
    def description(self) -> str:
        return "\n".join(f"{name}: {row(name).meaning} ({row(name).unit})" for name in self.metrics)

    def queries(self) -> list[tuple[str, str]]:
        """Expression and legend of each line."""
        return [(f"{prometheus_name(metric)}{{{RUN}}}", legend(metric)) for metric in map(row, self.metrics)]


def legend(metric: Metric) -> str:
    """What distinguishes a metric's lines: its labels, with its name where there are none."""
    labels = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    return f"{metric.section}/{metric.plain.removeprefix(metric.section + '_')} {labels}".strip()


@dataclass(frozen=True)
class Section:
    title: str
    panels: Sequence[Panel]


MISMATCH_BOUND = 0.05
"""Nats. Engine and trainer differ by less in bfloat16; beyond it, `beamline doctor mismatch` tells why."""
SILENT_BOUND_S = 30.0
"""As `telemetry.silent_s`."""

SECTIONS = (
    Section(
        "Learning",
        (
            Panel("Reward", ("reward/mean", "reward/std")),
            Panel("Accuracy of the samples", ("reward/accuracy", "reward/pass_at_n")),
            Panel(
                "Accuracy of evaluations, with its interval",
                ("eval/<source>/accuracy", "eval/<source>/accuracy_low", "eval/<source>/accuracy_high"),
            ),
            Panel("Entropy", ("policy/entropy",)),
            Panel("Divergence from the reference", ("policy/kl", "loss/kl")),
            Panel("Gradient norm", ("policy/grad_norm", "policy/grad_norm_max"), logarithmic=True),
            Panel("Clipped tokens", ("policy/clip_ratio",)),
            Panel("Response length", ("tokens/response_mean", "tokens/response_max")),
            Panel("Truncated responses", ("tokens/truncated",)),
        ),
    ),
    Section(
        "Agreement of engine and trainer",
        (
            Panel(
                "Mismatch",
                ("policy/mismatch_abs_mean", "policy/mismatch_abs_p99", "policy/mismatch_abs_max"),
                logarithmic=True,
                bound=MISMATCH_BOUND,
            ),
            Panel("Canary gap", ("sync/canary_gap/<worker>",), logarithmic=True),
            Panel("Routing", ("routing/agreement", "routing/fallback_share")),
            Panel("Staleness", ("staleness/mean", "staleness/max")),
        ),
    ),
    Section(
        "Time",
        (
            Panel(
                "A step's phases",
                ("timing/generate", "timing/train", "timing/sync", "timing/evaluate", "timing/checkpoint"),
                stacked=True,
            ),
            Panel(
                "Inside train",
                ("timing/train_old_logprobs", "timing/train_reference", "timing/train_update", "timing/train_<part>"),
                stacked=True,
            ),
            Panel("Inside sync", ("sync/prepare_s/<worker>", "sync/load_s/<worker>")),
            Panel(
                "Throughput",
                ("throughput/tokens_per_s", "throughput/generate_tokens_per_s", "engine/tokens_per_s/<worker>"),
            ),
            Panel("Steps", ("progress/step", "progress/num_steps")),
            Panel("Groups of the next batch", ("progress/scored_groups", "progress/needed_groups")),
        ),
    ),
    Section(
        "The ring",
        (
            Panel(
                "Ends of groups",
                ("ledger/trained", "ledger/filtered", "ledger/stale", "ledger/failed", "ledger/in_flight"),
                stacked=True,
            ),
            Panel("Queues", ("queue/pending/<queue>", "queue/unacked/<queue>")),
            Panel("Abstained gradings", ("reward/abstained", "reward/abstained/<kind>")),
            Panel("Blobs", ("blobs/used_bytes", "blobs/free_bytes"), stacked=True),
        ),
    ),
    Section(
        "Workers",
        (
            Panel("Policy version", ("workers/policy_version/<worker>",)),
            Panel("Time since the last heartbeat", ("workers/silent_s/<worker>",), bound=SILENT_BOUND_S),
            Panel("Left out of the newest policy", ("sync/left_out",)),
            Panel("Resident memory", ("resources/rss_bytes/<worker>",)),
            Panel("Requests in the engines", ("engine/running/<worker>", "engine/waiting/<worker>")),
            Panel("Key-value cache", ("engine/kv_cache/<worker>", "engine/kv_cache_peak/<worker>")),
            Panel("Gradings", ("grading/running/<worker>", "grading/waiting/<worker>")),
        ),
    ),
)
