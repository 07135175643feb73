"""Prometheus' alert rules, by the names of the metric schema."""

from dataclasses import dataclass
from typing import Any

from panels import MISMATCH_BOUND, SILENT_BOUND_S, row

from beamline.protocol.metric_schema import prometheus_name

NO_STEP_MIN = 15
"""Minutes without a step. A recipe whose steps take longer needs more."""
BLOBS_LEFT = 0.1
"""Share of the blob store that should stay free."""


@dataclass(frozen=True)
class Alert:
    """One rule. `{{ $labels.x }}` and `{{ $value }}` in its texts are filled in by Prometheus."""

    name: str
    expression: str
    lasting: str
    severity: str
    summary: str
    description: str


def m(name: str) -> str:
    """What a metric of the schema is called in Prometheus."""
    return prometheus_name(row(name))


def alerts() -> list[Alert]:
    """What should wake somebody (critical), or be looked at (warning)."""
    step, num_steps = m("progress/step"), m("progress/num_steps")
    pending, used, free = m("queue/pending/<queue>"), m("blobs/used_bytes"), m("blobs/free_bytes")
    return [
        Alert(
            "BeamlineNoStep",
            f"{step} < {num_steps} and changes({step}[{NO_STEP_MIN}m]) == 0 and {step} offset {NO_STEP_MIN}m >= 0",
            "1m",
            "critical",
            f"No step of run {{{{ $labels.run }}}} for {NO_STEP_MIN} minutes",
            "Step {{ $value }} was the last one. `beamline doctor stuck` says what waits for what.",
        ),
        Alert(
            "BeamlineRunGone",
            f'up{{job="beamline"}} == 0 and on (instance, run) '
            f"(last_over_time({step}[1h]) < last_over_time({num_steps}[1h]))",
            "1m",
            "critical",
            "Run {{ $labels.run }} no longer tells its numbers, and had not come to its end",
            "Its coordinator has ended or hangs. `beamline status` and the logs in the run's folder say more.",
        ),
        Alert(
            "BeamlineMismatchHigh",
            f"{m('policy/mismatch_abs_mean')} > {MISMATCH_BOUND}",
            "0m",
            "critical",
            'Engine and trainer of run {{ $labels.run }} disagree by {{ $value | printf "%.3g" }} nats a token',
            f"The bound is {MISMATCH_BOUND}. `beamline doctor mismatch` finds the cause.",
        ),
        Alert(
            "BeamlineGradingsAbstained",
            f"{m('reward/abstained')} > 0",
            "0m",
            "warning",
            "{{ $value }} samples of a step of run {{ $labels.run }} have no grade",
            "Graders crashed, ran out of time or gave no verdict; the log of reward says which.",
        ),
        Alert(
            "BeamlineQueueGrowing",
            f"min_over_time({pending}[5m]) > max_over_time({pending}[5m] offset 6m)",
            "5m",
            "warning",
            "The queue of {{ $labels.queue }} in run {{ $labels.run }} grows",
            "For ten minutes it has been longer than ever in the five minutes before: its workers fall behind.",
        ),
        Alert(
            "BeamlineWorkerSilent",
            f"{m('workers/silent_s/<worker>')} > {SILENT_BOUND_S:g}",
            "0m",
            "critical",
            "{{ $labels.worker }} of run {{ $labels.run }} is silent",
            "No heartbeat for {{ $value | humanizeDuration }}. `beamline doctor stuck` shows its last log lines.",
        ),
        Alert(
            "BeamlineWorkerLeftOut",
            f"{m('sync/left_out')} > 0",
            "0m",
            "warning",
            "Run {{ $labels.run }} goes on without {{ $value }} of its rollout workers",
            "They serve an older policy and generate nothing; `beamline status` says why.",
        ),
        Alert(
            "BeamlineBlobStoreFull",
            f"{free} < {BLOBS_LEFT} * ({used} + {free})",
            "2m",
            "warning",
            "The blob store of run {{ $labels.run }} is nearly full",
            "{{ $value | humanize1024 }}B are left; without room no group can be sent on.",
        ),
    ]


def rule_file() -> dict[str, Any]:
    """The file that `rule_files` of the Prometheus configuration names."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in alerts()
    ]
    return {"groups": [{"name": "beamline", "rules": rules}]}
