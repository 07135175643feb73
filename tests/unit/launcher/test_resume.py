"""Which checkpoint a run goes on from, what is refused, and what becomes of the earlier run's folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator.launch import leftovers
from beamline.coordinator.launch.run import run
from beamline.coordinator.launch.run_folder import RunFolder
from beamline.models import assets
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.run_files import read_config
from launcher_fakes import LineDisplay, fake_command
from made_checkpoints import STATE, make_checkpoint

NUM_STEPS = 12


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    return with_trainer(config, num_steps=NUM_STEPS, resume_mode="latest")


def with_trainer(config: RunConfig, **settings: str | int) -> RunConfig:
    return replace(config, trainer=replace(config.trainer, **settings))


def begin(config: RunConfig, *, overwrite: bool = False) -> tuple[RunConfig, list[str]]:
    """The configuration that the services of a start would read, and what the user is told."""
    told: list[str] = []
    folder = RunFolder.create(config, overwrite=overwrite)
    try:
        folder.fill(config, told.append)
    finally:
        folder.release()
    return read_config(folder.path), told


def refusal(config: RunConfig, *, overwrite: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        begin(config, overwrite=overwrite)
    return str(error.value)


@pytest.fixture
def earlier(config: RunConfig) -> Path:
    """The folder of a run of this configuration that came to step 6 and was killed."""
    placed, told = begin(config)
    path = Path(placed.run.dir) / "trial"
    assert told == [f"no checkpoint in {path / 'checkpoints'} yet: the run begins with step 1"]
    assert (placed.trainer.resume_mode, placed.trainer.resume_path) == ("latest", "")
    for name in ("jetstream/old", "nats/server.conf", "credentials/cli.json", "logs/trainer.log", "evals/old.jsonl"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("old")
    for name in ("summary.json", "report.html", "processes.json", "metrics.jsonl"):
        (path / name).write_text("{}")
    for step in (3, 6):
        checkpoint_of(placed, path / "checkpoints", step)
    return path


def checkpoint_of(placed: RunConfig, root: Path, step: int, **changes: object) -> Path:
    description = json.loads((Path(placed.model.path) / "config.json").read_text()) | changes
    return make_checkpoint(
        root, step, created=float(step), files={"policy/config.json": json.dumps(description).encode()}
    )


def damage(checkpoint: Path) -> None:
    path = checkpoint / STATE
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


def test_the_run_goes_on_from_its_newest_checkpoint_in_its_own_folder(config: RunConfig, earlier: Path) -> None:
    model = (earlier / "model" / "model.safetensors").stat()
    placed, told = begin(config)
    newest = earlier / "checkpoints" / "global_step_6"
    assert told == [f"going on after step 6, from {newest}"]
    assert placed.trainer.resume_path == str(newest)
    assert (earlier / "model" / "model.safetensors").stat().st_mtime_ns == model.st_mtime_ns
    for kept in (
        "logs/trainer.log",
        "metrics.jsonl",
        "summary.json",
        "evals/old.jsonl",
        "checkpoints/global_step_3/manifest.json",
    ):
        assert (earlier / kept).exists(), kept
    for gone in ("jetstream", "nats", "credentials", "processes.json"):
        assert not (earlier / gone).exists(), gone


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(config: RunConfig, earlier: Path) -> None:
    damage(earlier / "checkpoints" / "global_step_6")
    (earlier / "checkpoints" / ".global_step_9.draft").mkdir()
    placed, told = begin(config)
    assert placed.trainer.resume_path == str(earlier / "checkpoints" / "global_step_3")
    draft, damaged = (line for line in told if "is passed over" in line)
    assert f"{earlier}/checkpoints/.global_step_9.draft is passed over: incomplete" in draft
    assert f"{earlier}/checkpoints/global_step_6 is passed over: damaged: bucket 1 of rank-00000.state" in damaged
    assert told[-1] == f"going on after step 3, from {earlier}/checkpoints/global_step_3"


def test_a_begun_run_without_a_whole_checkpoint_is_refused_and_left_as_it_is(config: RunConfig, earlier: Path) -> None:
    for step in (3, 6):
        (earlier / "checkpoints" / f"global_step_{step}" / "manifest.json").unlink()
    before = sorted(earlier.rglob("*"))
    text = refusal(config)
    assert "has no whole checkpoint to go on from: begin the run anew with --overwrite" in text
    assert sorted(earlier.rglob("*")) == before
    placed, told = begin(config, overwrite=True)
    assert placed.trainer.resume_path == "" and "begins with step 1" in told[-1]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(config: RunConfig, earlier: Path) -> None:
    """A draft is none. What has ended is another matter: its results stay until the user says otherwise."""
    for step in (3, 6):
        (earlier / "checkpoints" / f"global_step_{step}").rename(earlier / "checkpoints" / f".global_step_{step}.draft")
    assert "has no whole checkpoint to go on from" in refusal(config)
    (earlier / "summary.json").unlink()
    placed, told = begin(config)
    assert told[-1] == f"no checkpoint in {earlier / 'checkpoints'} yet: the run begins with step 1"
    assert placed.trainer.resume_path == "" and (earlier / "metrics.jsonl").exists()
    assert not (earlier / "jetstream").exists()


def test_checkpoints_may_lie_elsewhere(config: RunConfig, earlier: Path, tmp_path: Path) -> None:
    """Then a new folder goes on from them too, and no other run may add its own."""
    (earlier / "checkpoints").rename(tmp_path / "ckpts")
    elsewhere = with_trainer(config, checkpoint_path=str(tmp_path / "ckpts"))
    placed, _ = begin(elsewhere)
    assert placed.trainer.resume_path == str(tmp_path / "ckpts" / "global_step_6")
    placed, _ = begin(elsewhere, overwrite=True)
    assert placed.trainer.resume_path == str(tmp_path / "ckpts" / "global_step_6")
    other = replace(with_trainer(elsewhere, resume_mode="none"), run=replace(config.run, name="other"))
    text = refusal(other)
    assert "ckpts has checkpoints of an earlier run, " in text and "trainer.resume_mode=latest" in text
    assert not (Path(config.run.dir) / "other").exists()


def test_a_new_run_starts_from_the_checkpoint_of_another(config: RunConfig, earlier: Path) -> None:
    other = replace(config, run=replace(config.run, name="other"))
    at_3 = earlier / "checkpoints" / "global_step_3"
    placed, told = begin(with_trainer(other, resume_mode="from_path", resume_path=str(at_3)))
    assert placed.trainer.resume_path == str(at_3) and told == [f"going on after step 3, from {at_3}"]
    assert Path(placed.model.path).parent.name == "other"


def test_a_damaged_checkpoint_that_was_asked_for_is_refused_and_another_offered(
    config: RunConfig, earlier: Path
) -> None:
    at_6 = earlier / "checkpoints" / "global_step_6"
    damage(at_6)
    other = replace(config, run=replace(config.run, name="other"))
    text = refusal(with_trainer(other, resume_mode="from_path", resume_path=str(at_6)))
    assert text.startswith(f"trainer.resume_path={at_6}: checkpoint {at_6} cannot be used: damaged: bucket 1")
    assert f"use {earlier}/checkpoints/global_step_3, the newest that is whole" in text
    assert not (Path(config.run.dir) / "other").exists()


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_mend(config: RunConfig, earlier: Path) -> None:
    text = refusal(with_trainer(config, num_steps=6))
    assert text.endswith("has 6 steps behind it, and trainer.num_steps=6: raise trainer.num_steps to go on")
    text = refusal(replace(config, model=replace(config.model, dtype="bfloat16")))
    assert "is of model.dtype=float32, not bfloat16: set model.dtype=float32" in text
    checkpoint_of(read_config(earlier), earlier / "checkpoints", 7, hidden_size=48)
    text = refusal(config)
    assert "global_step_7 does not fit model.path: foreign: it is of another BeamForCausalLM than" in text
    assert "hidden_size is 48, not 128" in text


def test_settings_that_contradict_each_other(config: RunConfig, earlier: Path) -> None:
    text = refusal(with_trainer(config, resume_path=str(earlier)))
    assert "leave resume_path out, or use resume_mode=from_path" in text
    text = refusal(with_trainer(config, resume_mode="none"))
    assert "exists already" in text and "go on with the old one by trainer.resume_mode=latest" in text
    at_6 = earlier / "checkpoints" / "global_step_6"
    text = refusal(with_trainer(config, resume_mode="from_path", resume_path=str(at_6)), overwrite=True)
    assert "which --overwrite would remove" in text and at_6.is_dir()


async def test_a_checkpoint_that_is_not_there_costs_no_folder(config: RunConfig, earlier: Path) -> None:
    asked = with_trainer(config, resume_mode="from_path", resume_path=str(earlier.parent / "nowhere"))
    with pytest.raises(ConfigError, match=r"trainer.resume_path=.*nowhere cannot be used: missing: it does not exist"):
        await run(asked, LineDisplay(), overwrite=True, command=fake_command())
    assert (earlier / "checkpoints" / "global_step_6").is_dir()


def test_a_live_run_is_not_taken_over(config: RunConfig, earlier: Path) -> None:
    live = RunFolder.create(config, overwrite=False)
    assert f"{earlier} is in use by a run: end it with `beamline stop trial`" in refusal(config)
    live.release()


def test_a_model_that_has_changed_since_is_refused(config: RunConfig, earlier: Path) -> None:
    path = earlier / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    text = refusal(config)
    assert text.startswith(f"{path} is not what the run began with") and f"Remove {earlier / 'model'}" in text
    assert not (earlier / ".model.draft").exists()


def test_processes_of_the_earlier_start_are_waited_for(config: RunConfig, earlier: Path) -> None:
    """Anything that has the run's folder as its `--run-dir`."""
    program = "import sys; print('here', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, "--run-dir", str(earlier)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"  # before that the system may not know its arguments yet
        with pytest.raises(ConfigError, match=rf"process {process.pid} of an earlier start .* within 0.1 s"):
            leftovers.await_end(earlier, deadline_s=0.1)
        process.kill()
        leftovers.await_end(earlier)
    assert begin(config)[0].trainer.resume_path


def test_assets_are_the_same_each_time(tmp_path: Path) -> None:
    """What a takeover compares."""
    first, second = (assets.materialise("tiny-beam", tmp_path / name) for name in ("first", "second"))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
