"""`python -m beamline.trainer.doctor REQUEST FOLDER`: read the samples that lie in the folder.

Samples and weights are checked before anything heavy is imported.
"""

import sys
from pathlib import Path

from beamline.protocol.doctor import ReadRequest
from beamline.runtime.heavy_import import import_heavy
from beamline.runtime.request_program import serve
from beamline.trainer import environment
from beamline.trainer.doctor.samples import read_samples
from beamline.trainer.doctor.subject import Subject


def read(request: ReadRequest, folder: Path) -> None:
    """Recompute the log-probabilities of the folder's samples; the readings are written into it."""
    subject = Subject.of(request)
    samples = read_samples(folder, subject.shape, subject.vocab_size)
    environment.prepare()
    import_heavy("beamline.trainer.doctor.recompute").recompute(subject, samples, folder)


if __name__ == "__main__":
    sys.exit(serve(ReadRequest, read))
