"""`python -m beamline.reward --run-dir DIR --worker NAME`."""

from beamline.reward.service import main
from beamline.runtime.service import run_service

if __name__ == "__main__":
    run_service("reward", main)
