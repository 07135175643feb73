"""`python -m beamline.trainer --run-dir DIR --worker NAME`."""

from beamline.runtime.service import run_service
from beamline.trainer.service import main

if __name__ == "__main__":
    run_service("trainer", main)
