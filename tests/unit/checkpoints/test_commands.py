"""`beamline checkpoints`, `verify` and `export`, on checkpoints of a few bytes."""

import json
import shutil
import time
from pathlib import Path

import pytest

from beamline.coordinator.checkpoint_table import age_text, layout_text, size_text
from beamline.coordinator.checkpoint_verify import verified
from beamline.coordinator.progress_bar import LineWork
from beamline.protocol.config import RunConfig, RunSection
from beamline.runtime.run_files import write_config
from command_line import beamline
from made_checkpoints import STATE, make_checkpoint


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with three checkpoints: the second lacks a file, and a fourth is being written."""
    folder = tmp_path / "runs" / "demo"
    write_config(folder, RunConfig(run=RunSection(name="demo", dir=str(tmp_path / "runs"))))
    (folder / "launcher.lock").touch()
    for step in (1, 2, 3):
        make_checkpoint(folder / "checkpoints", step, created=time.time() - 60 * (4 - step))
    (folder / "checkpoints" / "global_step_2" / "ledger.json").unlink()
    (folder / "checkpoints" / ".global_step_4.draft" / "policy").mkdir(parents=True)
    return tmp_path / "runs"


def test_the_list_has_a_row_for_each(runs: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = beamline(capsys, "checkpoints", "demo", "--runs", runs)
    header, third, second, first, draft, where = (" ".join(line.split()) for line in out.splitlines())
    assert (code, header) == (0, "step holds size age layout optimizer complete verified")
    assert third.startswith("3 latest policy 1")
    assert third.endswith(" 1 min TP2 EP2 disk yes no")
    assert "2 min TP2 EP2 disk no (incomplete: ledger.json is missing) no" in second
    assert first.startswith("1 policy ") and first.endswith(" 3 min TP2 EP2 disk yes no")
    assert draft.startswith("4 policy 0 bytes") and "no (incomplete: it is being written or removed" in draft
    assert where == f"in {runs / 'demo' / 'checkpoints'}"


def test_the_list_is_json_too(runs: Path, capsys: pytest.CaptureFixture[str]):
    _, out, _ = beamline(capsys, "checkpoints", runs / "demo", "--json")
    listing = json.loads(out)
    assert listing["root"] == str(runs / "demo" / "checkpoints")
    assert [(c["step"], c["is_latest"], bool(c["wrong"])) for c in listing["checkpoints"]] == [
        (3, True, False), (2, False, True), (1, False, False), (4, False, True),
    ]  # fmt: skip


def test_verify_reads_all_of_a_run_and_the_list_remembers(runs: Path, capsys: pytest.CaptureFixture[str]):
    root = runs / "demo" / "checkpoints"
    weights = root / "global_step_1" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"weights", b"Weights"))
    code, out, _ = beamline(capsys, "verify", "demo", "--runs", runs)
    third, second, first = out.splitlines()
    assert code == 1
    assert third.startswith(f"{root / 'global_step_3'}  whole, ")
    assert second == f"{root / 'global_step_2'}  incomplete: ledger.json is missing"
    damaged = "damaged: policy/model.safetensors is not what its manifest.json says: bytes have changed"
    assert first == f"{root / 'global_step_1'}  {damaged}"
    _, out, _ = beamline(capsys, "checkpoints", "demo", "--runs", runs)
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[1].endswith("yes 0 s ago") and rows[3].endswith(f"ago: {damaged}")


def test_verify_of_one_checkpoint(runs: Path, capsys: pytest.CaptureFixture[str]):
    root = runs / "demo" / "checkpoints"
    assert beamline(capsys, "verify", root / "latest")[0] == 0
    state = root / "global_step_3" / STATE
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    code, out, _ = beamline(capsys, "verify", root / "global_step_3")
    assert code == 1 and "damaged: bucket 2 of rank-00000.state (at 8192)" in out
    code, _, err = beamline(capsys, "verify", root / "global_step_8")
    assert code == 2 and f"{root / 'global_step_8'} is not there: {root} has global_step_3, global_step_1" in err


def test_a_checkpoint_that_a_live_run_removes_meanwhile_is_not_called_damaged(runs: Path):
    folder = runs / "demo" / "checkpoints" / "global_step_3"

    class Removing(LineWork):
        def advance(self, num: int = 1) -> None:
            shutil.rmtree(folder, ignore_errors=True)

    outcome = verified(folder, Removing())
    assert (outcome.wrong, outcome.line) == ("", f"{folder}  is no longer there: the run has removed it meanwhile")


@pytest.mark.parametrize("command", ["checkpoints", "verify"])
def test_an_unknown_run_is_answered_by_the_nearest_name(runs: Path, command: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = beamline(capsys, command, "demp", "--runs", runs)
    assert code == 2
    assert err == f"beamline: no run is called 'demp' in {runs}: the nearest is 'demo'\n"


def test_a_run_without_checkpoints(runs: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(runs / "demo" / "checkpoints")
    code, out, _ = beamline(capsys, "checkpoints", "demo", "--runs", runs)
    assert (code, out) == (0, f"no checkpoint in {runs / 'demo' / 'checkpoints'} yet\n")
    code, _, err = beamline(capsys, "verify", "demo", "--runs", runs)
    assert code == 2 and "demo has no checkpoint in" in err


def test_checkpoints_elsewhere_are_found(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = json.loads((runs / "demo" / "config.json").read_text())
    config["trainer"]["checkpoint_path"] = str(tmp_path / "elsewhere")
    (runs / "demo" / "config.json").write_text(json.dumps(config))
    make_checkpoint(tmp_path / "elsewhere", 5)
    _, out, _ = beamline(capsys, "checkpoints", "demo", "--runs", runs, "--json")
    assert [c["step"] for c in json.loads(out)["checkpoints"]] == [5]


def test_export_copies_the_policy_and_nothing_else(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = runs / "demo" / "checkpoints" / "latest"
    code, out, err = beamline(capsys, "export", source, tmp_path / "model")
    assert (code, out) == (0, f"{tmp_path / 'model'}\n"), err
    for path in (source / "policy").iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "model" / "model.safetensors").stat().st_nlink == 1, "what is exported is the user's own"
    code, _, err = beamline(capsys, "export", source, tmp_path / "model")
    assert code == 2 and err.startswith("beamline: ") and "is not empty: export into a new directory" in err


def test_export_refuses_a_damaged_policy_and_offers_another(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root = runs / "demo" / "checkpoints"
    config = root / "global_step_3" / "policy" / "config.json"
    config.write_bytes(config.read_bytes().replace(b"64", b"65"))
    code, _, err = beamline(capsys, "export", root / "latest", tmp_path / "model")
    assert code == 2
    assert "global_step_3 cannot be used: damaged: policy/config.json is not what its manifest.json says" in err
    assert f"use {root / 'global_step_1'}, the newest that is whole" in err
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "nothing is left of it"


def test_merging_is_for_adapters(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = runs / "demo" / "checkpoints" / "latest"
    code, _, err = beamline(capsys, "export", source, tmp_path / "model", "--merge")
    assert code == 2 and "global_step_3 holds a whole policy and no adapters: export it without merging" in err
    code, _, err = beamline(capsys, "export", source, tmp_path / "model", "--base", tmp_path)
    assert code == 2 and "--base is for --merge" in err


def test_sizes_ages_and_layouts_in_words():
    assert [size_text(n) for n in (0, 1023, 1024, 7 * 2**40)] == ["0 bytes", "1023 bytes", "1.0 KiB", "7.0 TiB"]
    assert [age_text(s) for s in (-1, 59, 61, 7200, 200000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    assert layout_text({"tensor": 1, "data": 1}) == "1 rank" and layout_text({}) == "–"
    assert layout_text({"data": 2, "pipeline": 2, "tensor": 2}) == "TP2 PP2 DP2"
