"""`python -m beamline.rollout --run-dir DIR --worker NAME`."""

from beamline.rollout.service import main
from beamline.runtime.service import run_service

if __name__ == "__main__":
    run_service("rollout", main)
