"""A finished run: what the page shows is what its folder holds."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from beamline.coordinator.observe.spans import read_spans
from beamline.coordinator.samples import read_samples, samples_path
from dashboards import Chromium, dashboard, figures, of, rows_of, table
from shown_run import LEDGER, NUM_STEPS, summary_of

LINES = ("reward/mean", "tokens/response_mean", "policy/mismatch_abs_mean", "policy/entropy", "policy/grad_norm",
         "throughput/tokens_per_s")  # fmt: skip
PHASES = ("generate", "train", "sync")


@pytest.fixture(scope="module")
def summary(finished: Path) -> dict[str, Any]:
    return summary_of(finished)


async def test_every_chart_holds_the_summarys_numbers(chromium: Chromium, url: str, summary: dict[str, Any]):
    page = await chromium.open(url)
    for metric in LINES:
        expected = [
            {"step": step["step"], "value": step["values"][metric]} for step in summary["steps"] if step["step"]
        ]
        assert await rows_of(page, metric.replace("/", "-")) == expected, metric
    accuracy = [
        {
            "step": evaluation["step"],
            "source": evaluation["name"],
            "accuracy": evaluation["values"]["accuracy"],
            "low": evaluation["values"]["accuracy_low"],
            "high": evaluation["values"]["accuracy_high"],
        }
        for evaluation in summary["evaluations"]
    ]
    assert len(accuracy) == 10
    assert await rows_of(page, "accuracy") == accuracy
    seconds = {(row["step"], row["phase"]): row["seconds"] for row in await rows_of(page, "phases")}
    assert len(seconds) == 4 * NUM_STEPS
    for step in summary["steps"]:
        for phase in PHASES if step["step"] else ():
            assert seconds[step["step"], phase] == step["values"][f"timing/{phase}"]


async def test_the_figures_are_the_summarys(chromium: Chromium, url: str, summary: dict[str, Any]):
    page = await chromium.open(url)
    assert await page.locator("#state").inner_text() == summary["status"] == "finished"
    assert await page.locator("#step").inner_text() == f"Step {NUM_STEPS} of {NUM_STEPS} done"
    assert await page.locator("#connection").inner_text() == "ended"
    assert await page.locator("#elapsed").inner_text() == "Took 1 min 20 s."
    assert summary["duration_s"] == 80.0
    last = summary["steps"][-1]["values"]
    note = f"step {NUM_STEPS}"
    shown = await figures(page)
    assert shown[-7:] == [
        ("reward", f"{last['reward/mean']:.3f}", note),
        ("training accuracy", f"{last['reward/accuracy']:.3f}", note),
        ("mismatch", f"{last['policy/mismatch_abs_mean']:.1e}", note),
        ("entropy", f"{last['policy/entropy']:.3f}", note),
        ("response length", f"{last['tokens/response_mean']:.1f}", note),
        ("tokens/s", f"{last['throughput/tokens_per_s']:,.0f}", note),
        ("seconds a step", f"{last['timing/step']:.2f}", note),
    ]
    largest = max(step["values"]["policy/mismatch_abs_mean"] for step in summary["steps"] if step["step"])
    assert shown[2:4] == [
        ("tokens/s", f"{summary['tokens_per_s']:,.0f}", "prompt and response, over all steps"),
        ("largest mismatch", f"{largest:.1e}", "mean |old − rollout| of a step"),
    ]
    first, newest = (
        e["values"]["accuracy"] for e in summary["evaluations"] if e["name"] == "chained-sums" and e["step"] in (0, 20)
    )
    assert shown[0][:2] == ("chained-sums accuracy", f"{100 * first:.1f} → {100 * newest:.1f} %")
    exact = await page.locator("#figures data").evaluate_all("all => all.map((data) => Number(data.value))")
    assert exact == [last[name] for name in ("reward/mean", "reward/accuracy", "policy/mismatch_abs_mean",
        "policy/entropy", "tokens/response_mean", "throughput/tokens_per_s", "timing/step")]  # fmt: skip


async def test_the_ledger_adds_up(chromium: Chromium, url: str, summary: dict[str, Any]):
    page = await chromium.open(url)
    text = " ".join((await page.locator("#sum").inner_text()).split())
    assert text == "704 issued = 612 trained + 83 filtered + 0 stale + 9 failed"
    assert summary["ledger"] == LEDGER
    await page.get_by_text("The ledger as a table").click()
    _, *ends, issued = await table(page, "#ledger")
    assert sum(int(count) for _, count, _ in ends) == int(issued[1]) == 704
    assert {name: int(count) for name, count, _ in ends} == {name: LEDGER[name] for name, _, _ in ends}
    assert "closes" in await page.locator("#closes").inner_text()


async def test_workers_and_evaluations_are_those_of_the_folder(chromium: Chromium, url: str, summary: dict[str, Any]):
    page = await chromium.open(url)
    _, *rows = await table(page, "#workers")
    last = summary["steps"][-1]["values"]
    shown = {row[0]: row[4] for row in rows}
    assert shown == {
        name.rpartition("/")[2]: f"{round(last[name] / 2**20):,} MiB" for name in last if name.startswith("resources/")
    }
    assert {row[1] for row in rows} == {"ended"}
    _, *evaluations = await table(page, "#evaluations")
    assert [(int(row[0]), row[1], row[2]) for row in evaluations] == [
        (e["step"], e["name"], f"{100 * e['values']['accuracy']:.1f} %") for e in summary["evaluations"]
    ]


async def test_the_timeline_is_that_of_the_spans(chromium: Chromium, url: str, finished: Path):
    page = await chromium.open(url)
    rows = await rows_of(page, "gantt")
    assert {row["step"] for row in rows} == {17.0, 18.0, 19.0, 20.0}
    assert {row["worker"] for row in rows} == {"coordinator", "rollout-0", "rollout-1", "reward", "trainer"}
    spans = {s.span_id: s for s in read_spans(finished)}
    newest = max((s for s in spans.values() if s.name == "step"), key=lambda s: s.start_ns)
    for span in spans.values():
        if span.trace_id == newest.trace_id and span.worker in ("coordinator", "trainer") and span.parent_id:
            alike = [r for r in rows if (r["worker"], r["work"], r["step"]) == (span.worker, span.name, 20)]
            seconds = (span.end_ns - span.start_ns) / 1e9
            assert any(row["seconds"] == pytest.approx(seconds, abs=1e-6) for row in alike), span
    groups = [row for row in rows if row["worker"] == "rollout-0" and row["step"] == 20 and row["kind"] == "generate"]
    assert [row["work"] for row in groups] == ["generate group × 6"]


async def test_a_chosen_steps_completions_are_shown(chromium: Chromium, url: str, finished: Path):
    page = await chromium.open(url)
    await page.get_by_text("2 prompt groups of step 20").wait_for()
    await page.get_by_label("Step", exact=True).fill("7")
    await page.keyboard.press("Enter")
    await page.get_by_text("2 prompt groups of step 7", exact=True).wait_for()
    kept = read_samples(samples_path(finished / "samples", 7))
    assert await page.locator("#samples article > pre").all_inner_texts() == [group.prompt for group in kept]
    completions = [completion for group in kept for completion in group.completions]
    assert await page.locator("#samples .answer > pre").all_inner_texts() == [c.text for c in completions]
    rewards = await page.locator("#samples .answer data").evaluate_all("all => all.map((data) => Number(data.value))")
    assert rewards == [c.reward for c in completions]
    marks = await page.locator("#samples .mark").all_inner_texts()
    assert marks == ["✓ right", "✗ wrong"] * 2


async def test_errors_of_the_logs_are_shown_with_their_tracebacks(chromium: Chromium, url: str):
    page = await chromium.open(url)
    trouble = page.locator("#troubles details")
    assert "trainer a checkpoint took longer than its interval" in await trouble.locator("summary").inner_text()
    await trouble.locator("summary").click()
    assert (await trouble.locator("pre").inner_text()).endswith("RuntimeError: the disk is slow")


GONE = {
    "metrics.jsonl": "metrics.jsonl is missing: figures are those of summary.json alone",
    "config.json": "config.json is missing: how many steps the run was to take is not known",
    "traces": "traces is missing: no timeline (telemetry.traces=false leaves none)",
    "samples": "samples is missing: no completions of steps (telemetry.kept_groups=0 leaves none)",
    "logs": "logs is missing: no errors out of logs",
}


async def test_of_a_half_removed_folder_what_is_left_is_shown(chromium: Chromium, finished: Path, tmp_path: Path):
    run = shutil.copytree(finished, tmp_path / "half")
    for name in (*GONE, "launcher.lock"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with dashboard(*of(run)) as url:
        page = await chromium.open(url)
        assert set(await page.locator("#notes li").all_inner_texts()) == set(GONE.values())
        summary = summary_of(run)
        expected = [s["values"]["reward/mean"] for s in summary["steps"] if s["step"]]
        assert [row["value"] for row in await rows_of(page, "reward-mean")] == expected
        assert await page.locator("figure[data-chart='gantt']").count() == 0
        assert "No completions were kept." in await page.locator("#samples-note").inner_text()


async def test_a_killed_run_is_shown_by_its_metrics_damaged_ones_left_out(
    chromium: Chromium, finished: Path, tmp_path: Path
):
    run = shutil.copytree(finished, tmp_path / "killed")
    expected = [s["values"]["policy/entropy"] for s in summary_of(run)["steps"] if s["step"]]
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'no record\n{"step":21,"time":1.0,"val')
    with dashboard(*of(run)) as url:
        page = await chromium.open(url)
        assert await page.locator("#state").inner_text() == "broken off"
        assert await page.locator("#elapsed").inner_text() == "Took 1 min 20 s.", "until its last record"
        assert [row["value"] for row in await rows_of(page, "policy-entropy")] == expected
        notes = await page.locator("#notes li").all_inner_texts()
        assert "metrics.jsonl has 1 damaged lines, which are left out" in notes
        assert any(note.startswith("summary.json is missing") for note in notes)
