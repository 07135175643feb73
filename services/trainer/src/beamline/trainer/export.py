"""`python -m beamline.trainer.export CHECKPOINT DIR`: a checkpoint's policy as a Hugging Face directory."""

import argparse
import sys
from pathlib import Path

from beamline.runtime.export import export
from beamline.runtime.request_program import exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m beamline.trainer.export", description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint's folder, or the folder of all checkpoints for the newest"
    )
    parser.add_argument("directory", type=Path, help="where to write the model; new or empty")
    arguments = parser.parse_args()
    return exit_code(lambda: print(export(arguments.checkpoint, arguments.directory)))


if __name__ == "__main__":
    sys.exit(main())
