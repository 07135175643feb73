"""The trainer service, which dies by SIGKILL between a checkpoint's files and its manifest."""

import os
import signal

from beamline.runtime.service import run_service
from beamline.trainer import checkpoint
from beamline.trainer.service import main


def die(*_: object, **__: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does nothing more")


if __name__ == "__main__":
    checkpoint.manifest_of = die
    run_service("trainer", main)
