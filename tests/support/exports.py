"""Runs programs that export with the interpreters that they need, whatever interpreter the tests run with."""

import os
import subprocess
from pathlib import Path

SUPPORT = Path(__file__).parent
TRAINER = SUPPORT.parents[1] / "services/trainer/.venv/bin/python"
COORDINATOR = SUPPORT.parents[1] / "services/coordinator/.venv/bin/python"
DEADLINE_S = 180
MODELS = ("tiny-beam", "tiny-qwen3-moe")
KINDS = ("whole", "sharded")


def make_exports(directory: Path) -> Path:
    """What `trained_export.py` says, in `directory`, which is returned."""
    return _run(TRAINER, "trained_export.py", directory)


def make_lora_exports(directory: Path) -> Path:
    """What `lora_exports.py` says, in `directory`, which is returned."""
    return _run(COORDINATOR, "lora_exports.py", directory)


def _run(python: Path, program: str, directory: Path) -> Path:
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(SUPPORT / program), str(directory)]
    done = subprocess.run(command, check=False, env=environment, timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory
