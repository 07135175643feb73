"""`python -m beamline.trainer.export CHECKPOINT DIR`: a checkpoint's policy as a Hugging Face directory."""

import argparse
import sys
from pathlib import Path

from beamline.protocol.errors import BeamlineError
from beamline.trainer import checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m beamline.trainer.export", description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint's folder, or the folder of all checkpoints for the newest"
    )
    parser.add_argument("directory", type=Path, help="where to write the model; new or empty")
    arguments = parser.parse_args()
    try:
        print(checkpoint.export(arguments.checkpoint, arguments.directory))
    except (BeamlineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
