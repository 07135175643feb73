"""ENV_FILE: its variables are the command's, unless they are set already."""

from pathlib import Path

import pytest

from beamline.coordinator import cli
from beamline.coordinator.env_file import load_env_file
from beamline.protocol.errors import ConfigError
from beamline.runtime.recipe import load_recipe

TEXT = """\
# of the cluster
NCCL_IB_HCA=mlx5
export WANDB_API_KEY='quoted # key'
RUN_NAME=from-file
EMPTY=
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / ".env"
    path.write_text(TEXT)
    return path


def test_variables_are_added_and_what_is_set_wins(file: Path) -> None:
    environment = {"ENV_FILE": str(file), "RUN_NAME": "mine"}
    load_env_file(environment)
    assert environment == {
        "ENV_FILE": str(file),
        "RUN_NAME": "mine",
        "NCCL_IB_HCA": "mlx5",
        "WANDB_API_KEY": "quoted # key",
        "EMPTY": "",
    }


@pytest.mark.parametrize("environment", [{}, {"ENV_FILE": ""}])
def test_without_one_nothing_is_read(environment: dict[str, str]) -> None:
    before = dict(environment)
    load_env_file(environment)
    assert environment == before


@pytest.mark.parametrize("line", ["WANDB_API_KEY", "a secret alone", "KEY='no end"])
def test_a_line_that_sets_nothing_is_named_by_number_and_not_shown(file: Path, line: str) -> None:
    file.write_text(f"A=1\n{line}\nB=2\n")
    environment = {"ENV_FILE": str(file)}
    with pytest.raises(ConfigError, match=r"\.env, line 2: not of the form NAME=value$"):
        load_env_file(environment)
    assert set(environment) == {"ENV_FILE"}


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff\xfe=\x00", "is not a text file")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "cluster.env"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"ENV_FILE={path} in the environment .*{why}"):
        load_env_file({"ENV_FILE": str(path)})


def test_every_command_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("ENV_FILE", str(tmp_path / "gone.env"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "demo"])
    assert ended.value.code == cli.CONFIG_EXIT
    assert "gone.env in the environment cannot be read: No such file" in capsys.readouterr().err


def test_a_recipe_takes_its_settings_from_it(file: Path) -> None:
    environment = {"ENV_FILE": str(file)}
    load_env_file(environment)
    assert load_recipe("tiny-beam", environment=environment).run.name == "from-file"
