"""`trainer-python make_checkpoint.py MODEL ROOT STEP [TENSOR]`: a checkpoint of a model as a trainer saves it.

One element of TENSOR, if one is named, is made larger by one.
"""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from beamline.runtime.checkpoints import POLICY, TrainerState
from beamline.runtime.model_identity import ModelIdentity
from saved_checkpoint import save

WEIGHTS = "model.safetensors"


def main(model: Path, root: Path, step: int, tensor: str = "") -> None:
    def write(draft: Path) -> None:
        into = draft / POLICY / WEIGHTS
        if not tensor:
            shutil.copyfile(model / WEIGHTS, into)
            return
        tensors = load_file(model / WEIGHTS)
        tensors[tensor].view(-1)[0] += 1
        save_file(tensors, into)

    identity = ModelIdentity.of(model)
    state = TrainerState(step=step, dtype="float32", model=identity, layout={}, optimizer={})
    save(root, model, state, write)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
