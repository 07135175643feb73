"""The metric schema: every name has one row, every row one name in Prometheus, and the page is made from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from beamline.protocol.metric_schema import METRICS, find, prometheus_name, prometheus_sample

ROOT = Path(__file__).resolve().parents[2]
OWNERS = {"coordinator", "rollout", "reward", "trainer", "every service"}


def test_the_page_is_made_from_the_schema() -> None:
    command = [sys.executable, ROOT / "tools" / "metrics_page.py", "--check"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stderr) == (0, "")


def test_every_row_says_all_there_is_to_say() -> None:
    for metric in METRICS:
        assert metric.unit and metric.meaning and "/" in metric.name, metric
        assert metric.owner in OWNERS, metric
        assert len(set(metric.labels)) == len(metric.labels), metric


def test_no_two_rows_are_called_alike() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    names = [prometheus_name(metric) for metric in METRICS]
    assert sorted(names) == sorted(set(names))


def test_a_row_is_found_by_a_name_that_it_describes() -> None:
    for metric in METRICS:
        name = metric.name.replace("<k>", "3")
        for label in metric.labels:
            name = name.replace(f"<{label}>", "word")
        assert find(name) == metric


@pytest.mark.parametrize("name", ["reward/unheard_of", "reward", "", "policy/mismatch_abs_mean_at_staleness/x"])
def test_a_name_that_no_row_describes(name: str) -> None:
    assert find(name) is None
    assert prometheus_sample(name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("policy/loss", ("beamline_policy_loss", {})),
        ("sync/canary_gap/rollout-0", ("beamline_sync_canary_gap", {"worker": "rollout-0"})),
        ("eval/a/b/pass_at_8", ("beamline_eval_pass_at", {"source": "a/b", "k": "8"})),
        ("timing/train", ("beamline_timing_train", {})),
        ("timing/train_update", ("beamline_timing_train_update", {})),
        ("timing/train_other", ("beamline_timing_train_by_part", {"part": "other"})),
        ("reward/abstained", ("beamline_reward_abstained", {})),
        ("reward/abstained/crash", ("beamline_reward_abstained_by_kind", {"kind": "crash"})),
    ],
)
def test_names_in_prometheus(name: str, expected: tuple[str, dict[str, str]]) -> None:
    assert prometheus_sample(name) == expected
