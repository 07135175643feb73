"""SIGKILL in mid-step, fifty times: always a complete generation, and what follows is what it would have been."""

import json
import subprocess
import sys
from pathlib import Path

NUM_KILLS = 50
DEADLINE_S = 240.0


def test_killed_at_fifty_random_moments(tmp_path: Path) -> None:
    program = Path(__file__).with_name("killed_training.py")
    command = [sys.executable, str(program), str(tmp_path), "7", str(NUM_KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    deaths = found["deaths"]
    assert sum(deaths.values()) == NUM_KILLS
    assert deaths["clock"] >= NUM_KILLS // 4
    assert {"preadv", "pwritev"} <= deaths.keys()
    assert found["completed"] == found["trainings"]
