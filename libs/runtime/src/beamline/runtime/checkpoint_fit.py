"""Whether a run trains what a checkpoint holds: all weights, or the same adapters."""

from pathlib import Path

from beamline.protocol.lora_config import LoraSection
from beamline.runtime.checkpoints import POLICY, TrainerState


def misfit(folder: Path, state: TrainerState, lora: LoraSection) -> str:
    """Why a run with `model.lora` as given cannot go on from a whole checkpoint, and the mend; empty where it can.

    How much is dropped out, and what is kept for the backward pass, may change.
    """
    if state.lora is None:
        if lora.is_on:
            return (
                f"checkpoint {folder} holds all weights, and model.lora.rank={lora.rank} trains adapters: set "
                f"model.lora.rank=0 to go on, or begin adapters on these weights with model.path={folder / POLICY}"
            )
        return ""
    if not lora.is_on:
        return (
            f"checkpoint {folder} holds adapters, and model.lora.rank=0 trains all weights: set model.lora.rank="
            f"{state.lora.rank} to go on, or begin with model.path=DIR after `beamline export {folder} DIR --merge`"
        )
    held, asked = _settings(state.lora), _settings(lora)
    for name, value in held.items():
        if value != asked[name]:
            return (
                f"checkpoint {folder} holds adapters with model.lora.{name}={value}, not {asked[name]}: set it so to "
                "go on"
            )
    return ""


def _settings(lora: LoraSection) -> dict[str, int | str]:
    """What decides which tensors there are and what they mean."""
    return {
        "rank": lora.rank,
        "alpha": lora.scale_numerator,
        "targets": f"[{','.join(sorted(set(lora.targets)))}]",
        "normalize_moe_lora": str(lora.normalize_moe_lora).lower(),
    }
