"""`beamline data` and the look that `beamline run` takes at its data, as a user meets them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from beamline.coordinator import cli
from beamline.models.datasets import read_rows
from prompt_files import BROKEN, json_lines, parquet, published_dapo, row, truth

SAMPLES = Path(__file__).parents[2] / "data"


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return int(end.value.code or 0), told.out, told.err


@pytest.mark.parametrize("what", BROKEN)
def test_check_names_what_is_broken(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, make, words = BROKEN[what]
    code, out, _ = command(capsys, "data", "check", make(tmp_path / name), "--grader", "none")
    assert code == 1
    for word in ("bad.", *words):
        assert word in out


@pytest.mark.parametrize("what", BROKEN)
def test_prepare_refuses_what_is_broken(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, make, words = BROKEN[what]
    code, _, err = command(capsys, "data", "prepare", "dapo", "--from", make(tmp_path / name), "--to", tmp_path / "out")
    assert code == 2 and len(err.splitlines()) == 1
    for word in ("beamline: ", name, *words):
        assert word in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", [what for what, (name, *_) in BROKEN.items() if name.endswith(".parquet")])
@pytest.mark.parametrize("key", ["data.train", "data.evals"])
def test_run_refuses_what_is_broken_before_anything_starts(
    tmp_path: Path, key: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, make, words = BROKEN[what]
    file = make(tmp_path / name)
    setting = f"{key}={file}" if key == "data.train" else f"{key}=[{{path: {file}}}]"
    code, _, err = command(capsys, "run", "tiny-beam", f"run.dir={tmp_path / 'runs'}", setting)
    assert code == 2 and len(err.splitlines()) == 1
    for word in (key, name, *words):
        assert word in err
    assert f"beamline data check {file}" in err or what == "a file without rows"
    assert not (tmp_path / "runs").exists()


def test_a_sound_file_is_said_to_be_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(
        capsys, "data", "prepare", "gsm8k", "--from", SAMPLES / "gsm8k-sample.jsonl", "--to", tmp_path
    )
    assert code == 0
    code, out, _ = command(capsys, "data", "check", out.strip(), "--model", "asset:tiny-beam")
    assert code == 0
    assert "64 rows" in out and "ground truths by math_dapo: sound" in out


@pytest.mark.parametrize(
    ("grader", "unreadable"), [("math_dapo", ["$"]), ("math_verify", ["$"]), ("gsm8k", ["$", "x+y"]), ("exact", [])]
)
def test_ground_truths_are_read_by_the_grader(
    tmp_path: Path, grader: str, unreadable: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = parquet(tmp_path / "rows.parquet", *(truth(text, n) for n, text in enumerate(["33", "$", "x+y", "1,000"])))
    code, out, _ = command(capsys, "data", "check", file, "--grader", grader, "--json")
    found = json.loads(out)
    assert code == (1 if unreadable else 0)
    assert (found["num_rows"], found["grader"]) == (4, grader)
    assert [finding["text"].partition(":")[0] for finding in found["findings"]] == [f'"{t}"' for t in unreadable]
    assert found["faults"] == ({"unreadable_truth": len(unreadable)} if unreadable else {})


def test_the_output_is_bounded_unless_all_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = parquet(tmp_path / "rows.parquet", *(row(0) for _ in range(31)))
    _, out, _ = command(capsys, "data", "check", file, "--grader", "none")
    assert out.count("the prompt of row 1 again") == 20
    assert "duplicate_prompt (prompts that stand in an earlier row): 30, 10 not shown: --all" in out
    _, out, _ = command(capsys, "data", "check", file, "--grader", "none", "--all")
    assert out.count("the prompt of row 1 again") == 30


@pytest.mark.parametrize("model", ["asset:tiny-beam", "directory"])
def test_prompts_over_the_limit_are_named(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from beamline.models import tokenizer

    if model == "directory":
        tokenizer.write(tmp_path)
    file = parquet(tmp_path / "rows.parquet", row(0), row(1, prompt=[{"role": "user", "content": "9" * 100}]))
    given = tmp_path if model == "directory" else model
    arguments = ("data", "check", file, "--model", given, "--max-prompt-tokens", 100, "--grader", "none")
    code, out, _ = command(capsys, *arguments)
    assert code == 1
    assert "rows.parquet row 2: 10" in out and "tokens, over the limit of 100" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.parquet"], ["absent.parquet is not a file"]),
        (["rows.jsonl", "--model", "asset:giant"], ["--model asset:giant", "tiny-beam"]),
        (["rows.jsonl", "--model", "nowhere"], ["--model nowhere", "does not exist"]),
        (["rows.jsonl", "--grader", "math_dappo"], ["math_dappo", "math_dapo"]),
        (["rows.jsonl", "--grader", "http"], ["http", "URL"]),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    json_lines(tmp_path / "rows.jsonl", row(0))
    code, _, err = command(capsys, "data", "check", *arguments)
    assert code == 2
    for word in words:
        assert word in err


def test_prepare_tells_what_it_left_out_and_writes_where_data_dir_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "sets"))
    file = published_dapo(tmp_path / "in.parquet", ["p", "q", "p", "r", "r"], ["1", "2", "1", "3", "4"])
    code, out, err = command(capsys, "data", "prepare", "dapo", "--from", file)
    assert code == 0
    assert out == f"{tmp_path}/sets/dapo-math-17k-cleaned.parquet\n"
    assert [line.strip() for line in err.splitlines()] == [
        "5 rows read, 2 written",
        "1 left out: equal to an earlier row",
        "2 left out: their prompts (1) have more than one answer",
    ]
    assert [r.ground_truth for r in read_rows(out.strip())] == ["1", "2"]


def test_without_a_network_a_set_is_asked_for_as_a_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    prepare = [sys.executable, "-m", "beamline.coordinator.cli", "data", "prepare", "dapo"]
    done = subprocess.run(
        prepare, env={"HF_ENDPOINT": endpoint, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=30,
        cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "BytedTsinghua-SIA/DAPO-Math-17k" in done.stderr and endpoint in done.stderr
    assert "--from FILE" in done.stderr and len(done.stderr.splitlines()) == 1
