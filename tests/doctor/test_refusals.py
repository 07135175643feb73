"""What the doctor cannot examine: one plain line, exit code 2, and what to do."""

import shutil
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator import cli
from beamline.protocol.blobs import RoutedExperts, decode_blob, encode_blob
from beamline.protocol.doctor import INDEX
from beamline.runtime.sample_files import read_index
from doctor_cases import Examined, FinishedRun


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line on stderr of a command that is refused."""
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "mismatch", *arguments])
    assert end.value.code in (1, 2)
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_an_unknown_run_is_answered_with_the_nearest(healthy: Examined, capsys: pytest.CaptureFixture[str]):
    line = refusal(capsys, "heathy", "--runs", str(healthy.run.path.parent))
    assert line.startswith("beamline: no run is called 'heathy'") and "'healthy'" in line


@pytest.mark.parametrize("arguments", [[], ["run", "--model", "model"]])
def test_one_subject_is_asked_for(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert "give either a finished run's name, or --model DIR" in refusal(capsys, *arguments)


def test_a_run_without_checkpoint(healthy: Examined, capsys: pytest.CaptureFixture[str]):
    run = healthy.run.copy("no-checkpoint")
    shutil.rmtree(run.path / "checkpoints")
    assert "run no-checkpoint has no checkpoint in" in refusal(capsys, str(run.path))


def test_weights_that_are_damaged(healthy: Examined, capsys: pytest.CaptureFixture[str]):
    run = healthy.run.copy("damaged-weights")
    weights = run.path / "checkpoints" / "global_step_3" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    line = refusal(capsys, str(run.path))
    assert "global_step_3 cannot be used: damaged: policy/model.safetensors is not what its manifest.json says" in line


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = refusal(capsys, "--model", str(tmp_path / "nowhere"), "--to", str(tmp_path / "doctor"))
    assert "nowhere" in line and not (tmp_path / "doctor").exists()


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--precision", "float16", "--precision float16: use one of float32, bfloat16"),
        ("--temperature", "0", "--temperature 0: greedy tokens tell nothing"),
        ("--data", "nowhere.parquet", "--data=nowhere.parquet is not a file"),
    ],
)
def test_options_that_cannot_be(
    healthy: Examined, option: str, value: str, text: str, capsys: pytest.CaptureFixture[str]
):
    assert text in refusal(capsys, str(healthy.run.path), option, value)


def first_trajectories(run: FinishedRun) -> Path:
    return run.samples / read_index(run.samples).groups[0].trajectories


def test_samples_that_are_damaged(healthy: Examined, capsys: pytest.CaptureFixture[str]):
    run = healthy.run.copy("damaged-samples")
    path = first_trajectories(run)
    path.write_bytes(path.read_bytes()[:-100])
    assert "are not a Trajectories blob" in refusal(capsys, str(run.path))
    path.unlink()
    assert f"{path} cannot be read" in refusal(capsys, str(run.path))
    (run.samples / INDEX).write_text("{}")
    assert f"delete {run.samples} and sample anew" in refusal(capsys, str(run.path))


def test_routes_that_do_not_fit_the_model(healthy: Examined, capsys: pytest.CaptureFixture[str]):
    run = healthy.run.copy("damaged-routes")
    path = run.samples / read_index(run.samples).groups[0].routed_experts
    blob = decode_blob(RoutedExperts, path.read_bytes())
    path.write_bytes(encode_blob(msgspec.structs.replace(blob, ids=memoryview(b"\xff" * len(blob.ids)))))
    line = refusal(capsys, str(run.path))
    assert "trajectory 0" in line and "[255, 255, 255, 255]" in line
