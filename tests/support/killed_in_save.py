"""`trainer-python killed_in_save.py SIGNAL ...`: the trainer service, which gets a signal while it saves.

It comes after a checkpoint's files and before its manifest, which is written when the trainer waits for it to end.
"""

import logging
import os
import signal
import sys
import threading

from beamline.runtime.service import run_service
from beamline.trainer import checkpoint
from beamline.trainer.service import main

WAITS_S = 20.0


class Heard(logging.Handler):
    """Sets an event when the trainer says that it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "the trainer ends when" in record.getMessage():
            self.waits.set()


def strike(number: int) -> None:
    real, heard = checkpoint.manifest_of, Heard()
    logging.getLogger("beamline.trainer.saving").addHandler(heard)

    def struck(*args: object, **kwargs: object) -> bytes:
        os.kill(os.getpid(), number)
        assert heard.waits.wait(WAITS_S), "the trainer has not waited for its checkpoint"
        return real(*args, **kwargs)

    checkpoint.manifest_of = struck


if __name__ == "__main__":
    strike(signal.Signals[sys.argv[1]])
    run_service("trainer", main, sys.argv[2:])
