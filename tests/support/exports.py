"""Runs `trained_export.py` with the trainer's interpreter, whatever interpreter the tests run with."""

import os
import subprocess
from pathlib import Path

SUPPORT = Path(__file__).parent
TRAINER = SUPPORT.parents[1] / "services/trainer/.venv/bin/python"
DEADLINE_S = 180
MODELS = ("tiny-beam", "tiny-qwen3-moe")
KINDS = ("whole", "sharded")


def make_exports(directory: Path) -> Path:
    """What `trained_export.py` says, in `directory`, which is returned."""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    command = [str(TRAINER), str(SUPPORT / "trained_export.py"), str(directory)]
    done = subprocess.run(command, check=False, env=environment, timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory
