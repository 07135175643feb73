"""The command line as a user meets it: exit codes, one plain line for an error, and a live run asked and told."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from beamline.coordinator import cli
from launcher_fakes import launch, read_until

DEADLINE_S = 60


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return int(end.value.code or 0), lines[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "tiny-beem"], "did you mean tiny-beam?"),
        (["run", "tiny-beam", "trainer.num_stepz=3"], "did you mean trainer.num_steps"),
        (["run", "tiny-beam", "trainer.optimizer.lr=-1"], "trainer.optimizer.lr=-1"),
        (["run", "tiny-beam", "model.path=/nowhere"], "model.path=/nowhere is not a directory"),
        (["run", "tiny-beam", "run.name=a.b"], "run.name='a.b': use 1 to 64 letters"),
        (["data", "prepare", "gsm8k", "--from", "nowhere.jsonl"], "nowhere.jsonl is not a file"),
        (["export", "nowhere", "model"], "nowhere is not a checkpoint's folder"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = refusal(arguments, capsys)
    assert code == 2
    assert line.startswith("beamline: ")
    assert text in line
    assert list(tmp_path.iterdir()) == [], "nothing was started or left"


def test_an_unknown_run_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "it has none" in refusal(["status", "demo", "--runs", str(tmp_path)], capsys)[1]
    (tmp_path / "demo-2").mkdir()
    (tmp_path / "demo-2" / "launcher.lock").touch()
    code, line = refusal(["status", "demo", "--runs", str(tmp_path)], capsys)
    assert (code, line) == (2, f"beamline: no run is called 'demo' in {tmp_path}: the nearest is 'demo-2'")
    assert "was ended before its end" in refusal(["status", "demo-2", "--runs", str(tmp_path)], capsys)[1]
    assert "has ended" in refusal(["stop", "demo-2", "--runs", str(tmp_path)], capsys)[1]
    assert "has no metrics yet" in refusal(["metrics", "demo-2", "--runs", str(tmp_path)], capsys)[1]


def test_a_run_s_folder_without_its_lock_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").touch()
    code, line = refusal(["doctor", "stuck", "demo", "--runs", str(tmp_path)], capsys)
    assert code == 2
    assert f"{tmp_path / 'demo'} was a run's folder, but its launcher.lock is gone" in line


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(cli.ConfigError):
        cli.main(["--debug", "run", "tiny-beem"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for command in ("run", "status", "stop", "pause", "resume", "metrics", "export", "data"):
        assert f" {command} " in shown


def test_data_is_prepared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    published = tmp_path / "gsm8k-test.jsonl"
    published.write_text(json.dumps({"question": "1+1?", "answer": "It is two.\n#### 2"}) + "\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "prepare", "gsm8k", "--from", str(published), "--to", str(tmp_path / "data")])
    assert end.value.code == 0
    written = Path(capsys.readouterr().out.strip())
    assert written == tmp_path / "data" / "gsm8k-test-cleaned.parquet"
    assert written.is_file()


async def beamline(folder: Path, *arguments: str) -> str:
    """The output of a command about the trial in `folder`."""
    command = (sys.executable, "-m", "beamline.coordinator.cli", *arguments, "--runs", str(folder / "runs"))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    output, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def test_a_live_run_is_asked_told_and_followed(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=follow")
    await read_until(process, "coordinator is ready")
    following = asyncio.create_task(beamline(tmp_path, "metrics", "trial", "--follow", "--json"))
    shown = await beamline(tmp_path, "status", "trial")
    assert "run trial: step 3/9, train" in shown
    assert "waiting for the trainer" in shown
    assert "groups: 4 issued = 4 trained" in shown
    assert "ends after the step under way" in await beamline(tmp_path, "stop", "trial")
    await read_until(process)
    assert await process.wait() == 0
    assert [json.loads(line)["step"] for line in (await following).splitlines()] == [1]
