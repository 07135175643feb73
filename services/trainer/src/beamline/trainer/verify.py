"""`python -m beamline.trainer.verify CHECKPOINT`: prints the folder of a checkpoint in which nothing is missing."""

import argparse
import sys
from pathlib import Path

from beamline.runtime import checkpoints
from beamline.runtime.request_program import exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m beamline.trainer.verify", description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint's folder, or the folder of all checkpoints for the newest"
    )
    arguments = parser.parse_args()
    return exit_code(lambda: print(checkpoints.resolve(arguments.checkpoint)))


if __name__ == "__main__":
    sys.exit(main())
