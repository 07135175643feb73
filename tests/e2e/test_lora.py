"""The demo by LoRA with the real engines: killed, gone on with, and learned; the base model stays what it was."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from beamline.models import assets
from beamline.runtime.base_identity import BaseIdentity
from beamline.runtime.checkpoints import ADAPTER, POLICY, step_folder, trainer_state
from real_runs import LiveRun, Run, beamline, ending, of_step, processes_of, shared_memory_of

NUM_STEPS, INTERVAL, KILLED_AFTER = 6, 3, 4
NUM_PROBLEMS = 128
SETTINGS = (
    f"trainer.num_steps={NUM_STEPS}",
    f"trainer.eval_interval={NUM_STEPS}",
    f"trainer.checkpoint_interval={INTERVAL}",
    f"data.evals=[{{path: 'task:chained-sums', name: chained-sums, max_problems: {NUM_PROBLEMS}}}]",
    "trainer.resume_mode=latest",
)
FROZEN = assets.weights("tiny-beam")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = asyncio.run(killed_and_resumed(tmp_path_factory.mktemp("lora")))
    assert run.code == 0, run.output
    return run


async def killed_and_resumed(folder: Path) -> Run:
    """The same command twice."""
    command = ("tiny-beam-lora", folder, *SETTINGS)
    with ending(LiveRun(*command)) as live:
        await live.started()
        await live.until(of_step(KILLED_AFTER), "the step after which all is killed")
        live.kill()
    with ending(LiveRun(*command)) as live:
        return await live.end()


def test_accuracy_on_held_out_problems_rises_by_0_30(run: Run):
    first, last = (run.evaluation("chained-sums", step) for step in (0, NUM_STEPS))
    assert first["num_problems"] == NUM_PROBLEMS and first["num_samples"] == 8
    assert last["accuracy"] - first["accuracy"] >= 0.30, (first, last)
    assert last["accuracy_low"] > first["accuracy_high"]


def test_it_went_on_from_its_newest_checkpoint(run: Run):
    assert f"going on after step {INTERVAL}, from {step_folder(run.path / 'checkpoints', INTERVAL)}" in run.output
    assert sorted(run.steps) == list(range(1, NUM_STEPS + 1))
    ledger = run.summary["ledger"]
    assert ledger["issued"] == sum(ledger[end] for end in ("trained", "filtered", "stale", "failed"))
    assert processes_of(run.path) == [] and shared_memory_of(run.path) == []


def test_the_base_is_the_same_to_the_bit(run: Run):
    """Before and after, on disk and by what every checkpoint remembers; and no weight of it has gone to an engine."""
    model = run.path / "model"
    assert (model / "model.safetensors").read_bytes() == FROZEN.read_bytes()
    for step in (INTERVAL, NUM_STEPS):
        folder = step_folder(run.path / "checkpoints", step)
        state = trainer_state(folder)
        assert state and state.base and state.base.is_of(BaseIdentity.of(model))
        assert (folder / ADAPTER).is_dir() and not (folder / POLICY).exists()
    sent = msgspec.msgpack.decode((run.path / "doctor" / "manifest.bin").read_bytes())
    assert sent["policy_version"] == NUM_STEPS
    assert all(".lora_A." in tensor["name"] or ".lora_B." in tensor["name"] for tensor in sent["tensors"])


def test_adapters_alone_move(run: Run):
    for step, values in run.steps.items():
        assert values["sync/num_bytes"] == values["sync/adapter_bytes"] > 0, step
        assert values["sync/adapter_share"] <= 0.15, step
    assert "adapters: 0.77 MiB, 12.1% of the model a sync" in run.output


def test_engine_and_trainer_agree_at_every_step_and_routes_are_replayed(run: Run):
    for step, values in run.steps.items():
        assert values["policy/mismatch_abs_mean"] <= 1e-5, step
        assert values["sync/canary_gap/rollout-0"] <= 1e-4, step
        assert values["routing/fallback_share"] == 0, step
        assert values["routing/agreement"] > 0.999, step
        assert values["policy/grad_norm"] > 0, step


def test_every_metric_is_documented(run: Run, is_documented):
    names = {name for values in run.steps.values() for name in values}
    assert sorted(name for name in names if not is_documented(name)) == []


def test_the_doctor_finds_both_sides_equal(run: Run):
    """From what the last evaluation kept: the base and the checkpoint's adapters, read anew by the trainer."""
    ended = beamline("doctor", "mismatch", str(run.path), deadline_s=240)
    assert ended.code == 0, ended.output
    assert ended.shown.startswith("The engine and the trainer agree: ")
    found = json.loads((run.path / "doctor" / "mismatch.json").read_text())
    assert (found["agrees"], found["routing"]) == (True, "replay")
    assert found["sampled_version"] == found["checkpoint_version"] == NUM_STEPS
    assert any(c["name"] == "weights" and c["evidence"].startswith("all ") for c in found["causes"])
    gaps = {reading["name"]: reading["gap"]["mean_abs"] for reading in found["readings"]}
    assert gaps["adapters left out"] > 1000 * found["gap"]["mean_abs"], "what was learned is in the adapters"


def test_its_adapters_export_and_the_merged_model_is_that_of_the_runs_end(run: Run, tmp_path: Path):
    artifacts = run.summary["artifacts"]
    for target, options in (("adapter", ()), ("merged", ("--merge",))):
        ended = beamline("export", artifacts["checkpoint"], str(tmp_path / target), *options, deadline_s=120)
        assert ended.code == 0, ended.output
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    assert adapter.read_bytes() == (Path(artifacts["checkpoint"]) / ADAPTER / adapter.name).read_bytes()
    merged = tmp_path / "merged" / "model.safetensors"
    assert merged.read_bytes() == (Path(artifacts["export"]) / merged.name).read_bytes() != FROZEN.read_bytes()


def test_adapters_of_another_rank_are_not_gone_on_with(run: Run):
    folder, name = run.path.parent, run.path.name
    ended = beamline("run", "tiny-beam-lora", f"run.dir={folder}", f"run.name={name}", *SETTINGS, "model.lora.rank=8")
    assert ended.code == 2 and "Traceback" not in ended.output, ended.output
    assert "holds adapters with model.lora.rank=16, not 8" in ended.output
