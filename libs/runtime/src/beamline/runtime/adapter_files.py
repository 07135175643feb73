"""Adapters as a directory in PEFT's format, which two kinds of readers read right.

    adapter_model.safetensors     base_model.model.<module>.lora_A.weight and .lora_B.weight, experts one by one
    adapter_config.json           rank, alpha, the modules, and the path of the model that they are of

A reader with one alpha / r for all adapters, as engines are, multiplies every B A by it. An adapter of a smaller rank k
has the scale alpha / k, so its B is stored times r / k. PEFT takes k from `rank_pattern`, to make matrices of the right
shape, and from `alpha_pattern` an alpha that gives alpha / r once more. Where r / k is no power of two the product is
stored in the next wider type, so that it is exact, and what is read back too.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamline.protocol.adapter import Adapter, B, adapter_shapes
from beamline.protocol.errors import WeightError
from beamline.runtime.tensor_file import FLOATS, Stored, TensorFile, header_of, narrowed, widened

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Before the name of every tensor: PEFT wraps a model twice."""

_FUSED = ("gate_proj", "up_proj", "down_proj")
"""In `target_modules` PEFT takes these for matrices of experts wherever they stand, and looks for them in the fused
parameters that transformers has; those of other layers have to be named by their parameters."""
_WIDER = {"BF16": "F32", "F16": "F32", "F32": "F64", "F64": "F64"}


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor as it is trained, without its adapter's scale."""

    name: str
    dtype: str
    """torch's name."""
    values: np.ndarray
    """Elements of the dtype's size; bfloat16 as uint16."""


def write_adapters(directory: Path, adapters: Sequence[Adapter], base: Path, tensors: Iterable[AdapterTensor]) -> None:
    """Write both files into a directory that is there, one tensor after the other.

    Args:
        base: Hugging Face directory of the model that the adapters are of.
        tensors: in the order of `adapter_shapes`, all of one type.

    Raises:
        OSError: the disk fails, once all tensors have come: other ranks may take part in making them.
    """
    write_config(directory, adapters, base)
    rest = iter(tensors)
    try:
        _write_weights(directory / WEIGHTS, adapters, rest)
    finally:
        for _ in rest:
            pass


def write_config(directory: Path, adapters: Sequence[Adapter], base: Path) -> None:
    """Write `adapter_config.json`."""
    rank, alpha = global_rank(adapters), adapters[0].alpha
    kinds = {adapter.module.rpartition(".")[2] for adapter in adapters}
    experts = [adapter for adapter in adapters if adapter.is_expert]
    of_experts = {adapter.module.rpartition(".")[2] for adapter in experts}
    apart = {_kind(a) for a in adapters if not a.is_expert and a.module.endswith(_FUSED)}
    patterns = _patterns(experts[0].rank) if experts and experts[0].rank < rank else {}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,  # a matter of training; with any other PEFT refuses fused parameters
        "bias": "none",
        "target_modules": sorted(kind for kind in kinds if kind not in _FUSED or kind in of_experts),
        "target_parameters": sorted(f"{kind}.weight" for kind in apart),
        "rank_pattern": patterns,
        "alpha_pattern": {pattern: alpha * k / rank for pattern, k in patterns.items()},
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def global_rank(adapters: Sequence[Adapter]) -> int:
    """The r of a reader that knows one."""
    return max(adapter.rank for adapter in adapters)


class AdapterFiles:
    """Such a directory, its tensors as they are trained.

    Raises:
        WeightError: its files are missing or damaged, or not those of adapters.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = TensorFile(directory / WEIGHTS)
        try:
            self._rank = int(json.loads((directory / CONFIG).read_bytes())["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightError(f"{directory / CONFIG} does not describe adapters: {error}") from error

    def check(self, adapters: Sequence[Adapter]) -> None:
        """Raises WeightError, naming a tensor that is missing, of another shape, or of none of these adapters."""
        shapes = adapter_shapes(list(adapters))
        for name, shape in shapes.items():
            if (found := self._entry(name).shape) != shape:
                raise WeightError(
                    f"tensor {name} in {self._directory} has shape {list(found)}, expected {list(shape)}: it is of "
                    "another model, or of another rank"
                )
        if foreign := [name for name in self._file.tensors if name.removeprefix(PREFIX) not in shapes]:
            raise WeightError(f"{self._directory} has a tensor {foreign[0]}, which is of no adapter of the model")

    def read(self, name: str) -> np.ndarray:
        """As float32, or float64 where that was needed. Raises WeightError for one that is missing or not finite."""
        self._entry(name)
        values = self._file.read(PREFIX + name)
        if not np.isfinite(values).all():
            where = np.argwhere(~np.isfinite(values))[0].tolist()
            raise WeightError(f"tensor {name} in {self._directory} is not finite at {where}: it cannot be merged")
        return values / factor(name, self._rank, values.shape)

    def _entry(self, name: str) -> Stored:
        if (found := self._file.tensors.get(PREFIX + name)) is None:
            raise WeightError(f"{self._directory} has no tensor {name}: it is incomplete, or of another model")
        return found


def factor(name: str, rank: int, shape: Sequence[int]) -> float:
    """By what a tensor, of this name and shape, is multiplied to be stored where `rank` is the r for all."""
    return rank / shape[1] if f".{B}." in name else 1.0


def _write_weights(path: Path, adapters: Sequence[Adapter], tensors: Iterable[AdapterTensor]) -> None:
    shapes, rank = adapter_shapes(list(adapters)), global_rank(adapters)
    dtypes: dict[str, str] = {}
    with path.open("wb") as file:
        for tensor, name in zip(tensors, shapes, strict=True):
            assert (tensor.name, tensor.values.shape) == (name, shapes[name]), f"{tensor.name} comes in place of {name}"
            dtype = FLOATS[tensor.dtype]
            if not dtypes:
                dtypes = {other: _stored_dtype(other, rank, shape, dtype) for other, shape in shapes.items()}
                file.write(header_of({PREFIX + other: (dtypes[other], shape) for other, shape in shapes.items()}))
            values = widened(tensor.values, dtype).astype(np.float64) * factor(name, rank, shapes[name])
            file.write(narrowed(values, dtypes[name]).tobytes())


def _stored_dtype(name: str, rank: int, shape: Sequence[int], dtype: str) -> str:
    is_power_of_two = math.frexp(factor(name, rank, shape))[0] == 0.5
    return dtype if is_power_of_two else _WIDER[dtype]


def _kind(adapter: Adapter) -> str:
    """Such as self_attn.gate_proj."""
    return ".".join(adapter.module.rsplit(".", 2)[-2:])


def _patterns(expert_rank: int) -> dict[str, int]:
    """Regular expressions of experts' matrices, the first that fits counts, and ranks.

    transformers has gate and up of all experts side by side in one parameter, and PEFT puts their adapters side by side
    as well. Where experts have the rank of all others, it works that out by itself.
    """
    return {r"experts\.gate_up_proj": 2 * expert_rank, r"experts(\.\d+)?\.(gate|up|down)_proj": expert_rank}
