"""Checkpoints of adapters, made without a trainer: real models and adapters of real shapes, the rest a few bytes."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from beamline.models import tiny
from beamline.models.checkpoint_file import to_bfloat16_bits
from beamline.protocol.adapter import Adapter, adapter_shapes, adapters_of
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.adapter_files import AdapterTensor, write_adapters
from beamline.runtime.base_identity import BaseIdentity
from beamline.runtime.checkpoint_manifest import MANIFEST, manifest_of
from beamline.runtime.checkpoints import ADAPTER, LATEST, TRAINER_STATE, TrainerState, step_folder
from beamline.runtime.model_identity import ModelIdentity


def adapters_with(name: str, lora: LoraSection) -> list[Adapter]:
    """Those of a tiny model."""
    spec = tiny.SPECS[name]
    return adapters_of(dict(spec.shapes()), lora, spec.num_experts_per_tok)


def write(
    directory: Path, adapters: list[Adapter], base: Path, tensors: Mapping[str, np.ndarray], dtype: str = "float32"
) -> None:
    """Adapters in PEFT's format, in a directory that is made."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = to_bfloat16_bits if dtype == "bfloat16" else np.asarray
    names = adapter_shapes(adapters)
    write_adapters(directory, adapters, base, (AdapterTensor(name, dtype, stored(tensors[name])) for name in names))


def make_adapter_checkpoint(
    root: Path, step: int, base: Path, name: str, lora: LoraSection, tensors: Mapping[str, np.ndarray]
) -> Path:
    """`<root>/global_step_N`, to which `latest` points from then on.

    Args:
        base: directory of the tiny model `name`.
    """
    folder = step_folder(root, step)
    write(folder / ADAPTER, adapters_with(name, lora), base, tensors)
    state = TrainerState(
        step=step,
        dtype="float32",
        model=ModelIdentity.of(base),
        layout={},
        optimizer={"state": "device"},
        base=BaseIdentity.of(base),
        lora=lora,
    )
    (folder / TRAINER_STATE).write_bytes(msgspec.json.encode(state))
    (folder / MANIFEST).write_bytes(manifest_of(folder, step))
    (root / LATEST).unlink(missing_ok=True)
    (root / LATEST).symlink_to(folder.name)
    return folder
