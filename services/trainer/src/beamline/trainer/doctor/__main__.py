"""`python -m beamline.trainer.doctor SAMPLES --model DIR --precision P --into FILE`: read kept samples.

Samples and weights are checked before anything heavy is imported.
"""

import argparse
import importlib
import sys
from pathlib import Path

from beamline.protocol.errors import BeamlineError
from beamline.trainer import environment
from beamline.trainer.doctor.samples import read_samples
from beamline.trainer.doctor.subject import Subject


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m beamline.trainer.doctor", description=__doc__)
    parser.add_argument("samples", type=Path, help="folder with samples.json")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint's folder, or a Hugging Face directory")
    parser.add_argument("--precision", required=True, help="that of the run")
    parser.add_argument("--live", action="store_true", help="the run does not replay routes")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--into", type=Path, required=True, help="where the readings are written")
    arguments = parser.parse_args()
    try:
        subject = Subject.of(
            arguments.model,
            dtype=arguments.precision,
            replay=not arguments.live,
            max_tokens=arguments.max_tokens,
        )
        samples = read_samples(arguments.samples, subject.shape, subject.vocab_size)
        environment.prepare()
        importlib.import_module("beamline.trainer.doctor.recompute").recompute(subject, samples, arguments.into)
    except (BeamlineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
