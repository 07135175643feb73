"""Which tensors of adapters lie where in this rank's parameters.

They follow from those of the matrix that is adapted. B has its rows, and is cut along them under tensor parallelism,
also where the matrix is cut along its columns; A is then cut as the matrix's columns are, and else along its rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.utils import ParallelLinearAdapter
from torch import Tensor, nn

from beamline.protocol.adapter import A, B
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.slots import boxes_of, is_ours, partition_dim, unit_of, whole
from beamline.trainer.shards import Slot

_WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterParts:
    """What this rank has of all adapters."""

    slots: dict[str, list[Slot]] = field(default_factory=dict)
    """By the parameter's name; a shared A under the first of its names alone."""
    units: list[list[Slot]] = field(default_factory=list)
    """What this rank exports, by matrix and layer; a shared A under each of its names."""


def parts_of(model: Model, tasks: Sequence[Any]) -> AdapterParts:
    """Of the adapters in a model.

    Args:
        tasks: the bridge's conversion tasks of the model as it was without them.
    """
    parts, units = AdapterParts(), dict[tuple[str, str], list[Slot]]()
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    wrappers = {id(part.to_wrap): part for part in model.module.modules() if isinstance(part, AdapterWrapper)}
    for task in tasks:
        wrapper = wrappers.get(id(task.megatron_module)) if task is not None else None
        for matrix, parameter, slots in _of(wrapper, task, model.config) if wrapper is not None else ():
            parts.slots[names[id(parameter)]] = slots[:1] if matrix == A else slots
            if is_ours(replace(task, param_weight=parameter), model.groups):
                units.setdefault((unit_of(task), matrix), []).extend(slots)
    parts.units.extend(units.values())
    return parts


def _of(wrapper: AdapterWrapper, task: Any, config: Any) -> Iterator[tuple[str, Tensor, list[Slot]]]:
    """A and B of every adapter of a matrix: the parameter, and what it holds under every name."""
    by_rows = partition_dim(task) == 0
    for adapter, names in _adapters(wrapper, task.mapping.hf_param):
        a, b = (replace(task, param_weight=linear.weight) for linear in (adapter.linear_in, adapter.linear_out))
        boxes = boxes_of(b, config) if len(names) > 1 else [whole(b, names[0])]
        a_dim, b_dim = (None, 0) if by_rows else (1, None)
        yield A, a.param_weight, [_named(whole(a, name), A, a_dim) for name in names]
        yield B, b.param_weight, [_named(slot, B, b_dim) for slot in boxes]


def _adapters(wrapper: AdapterWrapper, names: str | dict[str, str]) -> Iterator[tuple[Any, list[str]]]:
    """Every adapter of a matrix, with the Hugging Face names of the weights that it is for."""
    if isinstance(wrapper.adapter, nn.ModuleDict):
        assert isinstance(names, dict)
        for key, adapter in wrapper.adapter.items():
            if isinstance(adapter, ParallelLinearAdapter):
                yield adapter, [names[key.removeprefix("adapter_")]]
    else:
        yield wrapper.adapter, list(names.values()) if isinstance(names, dict) else [names]


def _named(slot: Slot, matrix: str, dim: int | None) -> Slot:
    """The slot of a weight as that of its adapter; `dim` is along which an engine cuts it."""
    return replace(slot, name=f"{slot.name.removesuffix(_WEIGHT)}.{matrix}{_WEIGHT}", dim=dim)
