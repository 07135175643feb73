"""A GPU's memory between two processes. In one process, test_transports.py says what is promised."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from beamline.weights.cuda_ipc import CudaOwner
from beamline.weights.manifest import WeightManifest
from beamline.weights.staging import Stage
from weight_shards import export

SUPPORTED = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
"""For a process of this file's own."""


@pytest.mark.gpu
def test_another_process_opens_the_memory_and_lets_go_by_dying(tmp_path: Path) -> None:
    owner = CudaOwner(tmp_path / "rank-00000.sock")
    manifest = export(owner, 0)
    command = [sys.executable, __file__, manifest.encode().hex()]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=SUPPORTED)
    assert child.stdout is not None and child.stdout.read(4) == b"open", "its checksums fit"
    assert owner.num_readers == 1
    child.kill()
    child.wait()
    child.stdout.close()
    owner.close()
    assert owner.num_readers == 0


if __name__ == "__main__":
    held = Stage().fetch(WeightManifest.decode(bytes.fromhex(sys.argv[1])))
    print("open", end="", flush=True)
    threading.Event().wait()
