"""A checkpoint by the trainer's own steps, one after the other and without a trainer around them."""

from collections.abc import Callable
from pathlib import Path

from beamline.runtime.checkpoints import POLICY, TrainerState
from beamline.runtime.model_description import describe
from beamline.trainer.checkpoint import begin, seal


def save(root: Path, model_dir: Path, state: TrainerState, write: Callable[[Path], None]) -> Path:
    """Write the checkpoint of `state.step` and return its folder.

    Args:
        model_dir: Hugging Face directory whose configuration and tokenizer the policy takes over.
        write: writes weights and optimizer into a folder (`Policy.save`).
    """
    draft = begin(root, state.step)
    describe(model_dir, draft / POLICY, state.dtype)
    write(draft)
    return seal(draft, state)
