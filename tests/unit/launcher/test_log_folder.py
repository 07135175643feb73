"""`run.log_path`: logs lie elsewhere, are found through the run's folder, and are not mixed with another run's."""

from pathlib import Path

import pytest

from beamline.coordinator.launch.log_folder import place_logs, remove_logs
from beamline.protocol.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "demo"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "demo"


def test_without_a_log_path_logs_lie_in_the_runs_folder(run_dir: Path) -> None:
    place_logs(run_dir, "")
    assert (run_dir / "logs").is_dir() and not (run_dir / "logs").is_symlink()


def test_with_one_they_lie_there_and_are_found_through_the_runs_folder(run_dir: Path, elsewhere: Path) -> None:
    place_logs(run_dir, str(elsewhere))
    (run_dir / "logs" / "trainer.log").write_text("a line\n")
    assert (elsewhere / "trainer.log").read_text() == "a line\n"


def test_a_run_that_goes_on_adds_to_its_logs(run_dir: Path, elsewhere: Path) -> None:
    place_logs(run_dir, str(elsewhere))
    (elsewhere / "trainer.log").write_text("a line\n")
    place_logs(run_dir, str(elsewhere))
    assert (run_dir / "logs" / "trainer.log").read_text() == "a line\n"


def test_a_run_that_goes_on_keeps_its_logs_in_one_place(run_dir: Path, elsewhere: Path, tmp_path: Path) -> None:
    place_logs(run_dir, str(elsewhere))
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match=rf"run.log_path={other}: the run that goes on has its logs in {elsewhere}"):
        place_logs(run_dir, str(other))
    assert not other.exists()
    place_logs(run_dir, "")
    assert (run_dir / "logs").resolve() == elsewhere


def test_another_runs_logs_are_not_added_to(run_dir: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(parents=True)
    (elsewhere / "rollout-0.log").touch()
    with pytest.raises(ConfigError, match=r"holds logs of another run, such as rollout-0\.log"):
        place_logs(run_dir, str(elsewhere))
    assert not (run_dir / "logs").exists()


def test_a_file_is_no_folder_for_logs(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.log_path=.*file/logs cannot be a folder for logs: Not a directory"):
        place_logs(run_dir, str(tmp_path / "file" / "logs"))


def test_logs_whose_folder_was_removed_begin_anew(run_dir: Path, elsewhere: Path) -> None:
    place_logs(run_dir, str(elsewhere))
    elsewhere.rmdir()
    place_logs(run_dir, str(elsewhere))
    assert elsewhere.is_dir() and (run_dir / "logs").resolve() == elsewhere


def test_a_replaced_runs_logs_go_with_it_and_nothing_else_does(run_dir: Path, elsewhere: Path) -> None:
    place_logs(run_dir, str(elsewhere))
    for name in ("trainer.log", "notes.txt"):
        (elsewhere / name).touch()
    remove_logs(run_dir)
    assert [path.name for path in elsewhere.iterdir()] == ["notes.txt"]
    assert not (run_dir / "logs").is_symlink()
    place_logs(run_dir, str(elsewhere))
