"""Which policy the trainer begins with: that of `model.path`, or that of the checkpoint from which the run goes on."""

from pathlib import Path

import msgspec

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BeamlineError, WeightError
from beamline.protocol.messages import PolicyUpdate
from beamline.runtime.checkpoint_fit import misfit
from beamline.runtime.checkpoints import TRAINER_STATE, TrainerState, damage


def first_step(config: RunConfig) -> int:
    """The step of the checkpoint at `trainer.resume_path`; 0 where the run begins anew.

    Raises WeightError for a checkpoint that is incomplete, of another model or of other adapters. Its files are not
    read through.
    """
    if not config.trainer.resume_path:
        return 0
    folder = Path(config.trainer.resume_path)
    if wrong := damage(folder, deep=False, model=Path(config.model.path)):
        raise WeightError(f"checkpoint {folder} cannot be used with model.path={config.model.path}: {wrong}")
    state = msgspec.json.decode((folder / TRAINER_STATE).read_bytes(), type=TrainerState)
    if wrong := misfit(folder, state, config.model.lora):
        raise WeightError(wrong)
    return state.step


def check_continues(run: str, first: int, last: PolicyUpdate | None) -> None:
    """A trainer that has started again must not pass its first policy off for a later one.

    Args:
        first: step of the policy that it begins with.
        last: what the run's trainer has published last, if it has published anything.

    Raises:
        BeamlineError: that was another policy.
    """
    if last is not None and last.policy_version != first:
        raise BeamlineError(
            f"run {run} is at policy {last.policy_version}, which died with its trainer, and this trainer begins with "
            f"policy {first}: end the run, and go on from its newest checkpoint (trainer.resume_mode=latest)"
        )
