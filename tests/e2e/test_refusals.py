"""What is refused before anything starts, as a user meets it: one line with thing, value and mend, and exit code 2."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from beamline.models import assets
from real_runs import ROOT, beamline, processes_of, run_to_end


def refused(tmp_path: Path, *overrides: str) -> str:
    run = run_to_end("tiny-beam", tmp_path, *overrides)
    assert run.code == 2, run.output
    assert "Traceback" not in run.output
    assert not run.path.exists(), "a run that did not start leaves no folder"
    assert processes_of(tmp_path) == []
    return run.output


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("trainer.optimzer.lr=1e-4", ("trainer.optimzer.lr", "trainer.optimizer.lr")),
        ("trainer.lr=1e-4", ("trainer.lr", "trainer.optimizer.lr")),
        ("trainer.optimizer.lr=-0.1", ("trainer.optimizer.lr", "-0.1", "> 0")),
        ("trainer.num_steps=many", ("trainer.num_steps", "many", "int")),
        ("algorithm.num_mini_batches=64", ("algorithm.num_mini_batches=64", "groups_per_step=32")),
        ("data.chat_template_kwargs.reasoning_effort=huge", ("reasoning_effort", "huge", "minimal")),
        ("run.loggers=[consle]", ("run.loggers", "consle", "console")),
        (
            "model.lora={rank: 18, normalize_moe_lora: true}",
            ("model.lora.rank=18", "num_experts_per_tok=4", "use rank 16 or 20"),
        ),
        ("model.lora={rank: 16, targets: [linear_qv]}", ("model.lora.targets", "linear_qv", "linear_qkv")),
    ],
)
def test_a_recipe_that_cannot_work(tmp_path: Path, override: str, texts: tuple[str, ...]):
    output = refused(tmp_path, override)
    for text in texts:
        assert text in output, output


def test_a_model_without_a_tokenizer(tmp_path: Path):
    model = assets.materialise("tiny-beam", tmp_path / "model")
    (model / "tokenizer.json").unlink()
    output = refused(tmp_path, f"model.path={model}")
    assert str(model) in output and "tokenizer.json" in output


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("reward.grader=math_dappo", ("reward.grader", "math_dappo", "math_dapo")),
        ("data.max_prompt_tokens=4", ("data.max_prompt_tokens=4", "chained-sums")),
    ],
)
def test_what_a_service_refuses_stops_the_run_with_its_line(tmp_path: Path, override: str, texts: tuple[str, ...]):
    run = run_to_end("tiny-beam", tmp_path, override)
    assert run.code == 2 and "Traceback" not in run.output, run.output
    for text in texts:
        assert text in run.output, run.output
    assert processes_of(run.path) == []


def test_a_checkout_that_was_not_set_up(tmp_path: Path):
    shutil.copytree(ROOT / "bin", tmp_path / "bin")
    command = [tmp_path / "bin" / "beamline", "run", "tiny-beam"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "services/coordinator/.venv/bin/python" in ended.stderr and "make setup" in ended.stderr


def test_a_port_that_is_taken(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = refused(tmp_path, f"bus.port={port}")
    assert f"bus.port={port}" in output and "in use" in output


def test_an_unknown_recipe_and_an_unknown_run():
    ended = beamline("run", "tiny-beem")
    assert ended.code == 2 and "tiny-beam" in ended.output
    ended = beamline("status", "no-such-run")
    assert ended.code == 2 and "no-such-run" in ended.output
