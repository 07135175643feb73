"""Real filesystems that are full, or have no O_DIRECT."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

APART = ("unshare", "--map-root-user", "--mount")
"""Runs a command that may mount what it likes, and nobody else sees it."""


def can_mount() -> bool:
    """Whether small disks can be had here."""
    command = (*APART, "sh", "-c", "mount -t tmpfs tmpfs /mnt")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What small_disks.py saw, and what it logged."""
    if not can_mount():
        pytest.skip("needs a user namespace in which filesystems can be mounted")
    program = Path(__file__).with_name("small_disks.py")
    command = [*APART, sys.executable, str(program), str(tmp_path_factory.mktemp("disks"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"log": done.stderr}


def test_a_disk_too_small_is_said_when_the_optimizer_is_made(found: dict[str, Any]) -> None:
    start = found["too_small_from_the_start"]
    said = r"tiny/state has no room for two generations of 100000 parameters: 240\d+ bytes are needed, \d+ are free"
    assert re.search(said, start["error"]), start
    assert start["files"] == ["lock"]


def test_a_disk_that_fills_up_stops_the_step_before_anything_changes(found: dict[str, Any]) -> None:
    middle = found["full_in_the_middle"]
    assert re.search(r"small/state has no room: \d+ bytes are needed, \d+ are free", middle["error"]), middle
    assert middle["untouched"]


def test_with_room_again_training_goes_on_as_if_nothing_had_been(found: dict[str, Any]) -> None:
    middle = found["full_in_the_middle"]
    assert (middle["num_steps"], middle["equal"]) == (4, True)


def test_a_state_that_does_not_fit_leaves_no_header(found: dict[str, Any]) -> None:
    writing = found["full_while_a_state_is_written"]
    assert "writing has no room" in writing["error"]
    assert writing["headers"] == []


def test_without_direct_io_it_works_and_says_so_once(found: dict[str, Any]) -> None:
    assert found["without_direct_io"] == {"io": "buffered", "equal": True}
    lines = [line for line in found["log"].splitlines() if "O_DIRECT" in line]
    assert len(lines) == 1 and "ram/state has no O_DIRECT" in lines[0], lines
