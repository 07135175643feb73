"""What the samples are read with: a model, its policy version, and how the run's trainer computes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamline.models.routing import RoutingShape
from beamline.protocol.doctor import ReadRequest
from beamline.protocol.lora_config import LoraSection
from beamline.runtime import checkpoints
from beamline.runtime.checkpoint_manifest import MANIFEST
from beamline.trainer.model_dir import check_model_dir


@dataclass(frozen=True)
class Subject:
    """A model's directory and what its configuration says."""

    model: Path
    """Of a run with LoRA its base."""
    policy_version: int
    """-1 for a model that is no checkpoint's."""
    shape: RoutingShape
    vocab_size: int
    softcap: float | None
    dtype: str
    """Precision of the run."""
    replay: bool
    """Whether the run replays the engine's routes."""
    max_tokens: int
    """Of one micro-batch."""
    lora: LoraSection
    """Off where the model is all of the policy."""
    adapters: Path | None
    """Their directory in PEFT's format, where there are some."""

    @classmethod
    def of(cls, request: ReadRequest) -> "Subject":
        """What a request names.

        Raises:
            WeightError: a checkpoint that is missing or damaged.
            ConfigError: a directory that is no model's.
        """
        path = Path(request.model)
        model, version, adapters = path, -1, None
        if (path / checkpoints.LATEST).is_symlink() or (path / MANIFEST).exists():
            folder = checkpoints.resolve(path)
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            model, version = folder / checkpoints.POLICY, int(state["step"])
            if request.base:
                model, adapters = Path(request.base), folder / checkpoints.ADAPTER
        check_model_dir(model)
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return cls(
            model=model,
            policy_version=version,
            shape=RoutingShape.of(model),
            vocab_size=config["vocab_size"],
            softcap=config.get("final_logit_softcapping"),
            dtype=request.dtype,
            replay=request.replay,
            max_tokens=request.max_tokens,
            lora=request.lora if adapters else LoraSection(),
            adapters=adapters,
        )
