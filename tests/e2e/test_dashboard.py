"""The demo's dashboard, open in a browser from the run's beginning to its end, and once more afterwards."""

import pytest

from real_runs import DEMO_STEPS, Run
from watched_run import Shown, Watched

LINES = ("reward/mean", "tokens/response_mean", "policy/mismatch_abs_mean", "policy/entropy",
         "throughput/tokens_per_s")  # fmt: skip
PHASES = ("generate", "train", "sync", "evaluate", "checkpoint")


@pytest.fixture
def watched(demo: Run) -> Watched:
    if demo.watched is None:
        pytest.skip("needs Debian's chromium on the PATH")
    return demo.watched


def test_it_followed_the_run_without_being_loaded_again(watched: Watched):
    assert watched.live_state == "running"
    assert watched.live_connection == "live: this page updates by itself"
    every = [f"Step {step} of {DEMO_STEPS} done" for step in range(DEMO_STEPS + 1)]
    assert watched.steps == sorted(watched.steps, key=every.index), "it never went back"
    assert watched.steps[0] == every[0] and watched.steps[-1] == every[-1] and len(watched.steps) > DEMO_STEPS / 2
    workers = {row[0]: row for row in watched.live_workers[1:]}
    assert set(workers) == {"coordinator", "rollout-0", "reward", "trainer"}
    assert all(row[4].endswith(" MiB") and row[5].endswith("s ago") for row in workers.values())
    assert watched.complaints == []


@pytest.mark.parametrize("when", ["ended", "opened_after"])
def test_its_values_are_the_summarys(watched: Watched, demo: Run, when: str):
    shown: Shown = getattr(watched, when)
    summary = demo.summary
    assert (shown.state, shown.step) == (summary["status"], f"Step {DEMO_STEPS} of {DEMO_STEPS} done")
    for metric in LINES:
        rows = [{"step": s["step"], "value": s["values"][metric]} for s in summary["steps"] if metric in s["values"]]
        assert shown.charts[metric.replace("/", "-")] == rows, metric
    assert [
        (row["step"], row["source"], row["accuracy"], row["low"], row["high"]) for row in shown.charts["accuracy"]
    ] == [
        (e["step"], e["name"], e["values"]["accuracy"], e["values"]["accuracy_low"], e["values"]["accuracy_high"])
        for e in summary["evaluations"]
    ]
    seconds = {(row["step"], row["phase"]): row["seconds"] for row in shown.charts["phases"]}
    for step in summary["steps"]:
        for phase in PHASES:
            assert seconds.get((step["step"], phase)) == step["values"].get(f"timing/{phase}")
    figures = {(label, note): text for label, text, note in shown.figures}
    last, note = demo.steps[DEMO_STEPS], f"step {DEMO_STEPS}"
    assert figures["reward", note] == f"{last['reward/mean']:.3f}"
    assert figures["mismatch", note] == f"{last['policy/mismatch_abs_mean']:.1e}"
    assert figures["tokens/s", "prompt and response, over all steps"] == f"{summary['tokens_per_s']:,.0f}"
    ledger = {name: int(count.replace(",", "")) for name, count, _ in shown.ledger}
    assert ledger.pop("issued") == sum(ledger.values()) == summary["ledger"]["issued"]
    assert ledger == {name: summary["ledger"][name.replace(" ", "_")] for name in ledger}


def test_its_timeline_has_the_last_steps_of_every_worker(watched: Watched):
    rows = watched.opened_after.charts["gantt"]
    assert {row["worker"] for row in rows} >= {"coordinator", "rollout-0", "reward", "trainer"}
    last = {row["work"].partition(" ×")[0] for row in rows if row["step"] == DEMO_STEPS}
    assert {"generate", "train", "sync", "train step", "generate group", "score group"} <= last
