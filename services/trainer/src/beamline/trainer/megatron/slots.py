"""Which Hugging Face tensors lie where in this rank's parameters: worked out once, from Megatron-Bridge's mappings.

The bridge itself exports by gathering every tensor on every rank. Its mappings say how a parameter is made of tensors,
Megatron how parameters are shared out; together that is each rank's own part, and nothing has to be gathered.
"""

import re
from collections.abc import Sequence
from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router

from beamline.protocol.errors import ConfigError
from beamline.trainer.megatron.gradients import is_expert
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.norms import RMSNorm
from beamline.trainer.shards import Slot

_ONE_TO_ONE = (AutoMapping, ColumnParallelMapping, RowParallelMapping, ReplicatedMapping)
_EXPERT_NUMBER = re.compile(r"\.local_experts\.\d+\.")


def units_of(model: Model, tasks: Sequence[Any]) -> list[list[Slot]]:
    """What this rank exports: query, key and value of a layer in one unit, as all its experts' gates and ups, and all
    their downs. Of what several ranks hold, the first of them exports it.

    Args:
        tasks: the bridge's conversion tasks.

    Raises:
        ConfigError: the bridge does more to a parameter than to move it.
    """
    check_bridge(model)
    units: dict[str, list[Slot]] = {}
    for task in tasks:
        if task is not None and task.param_weight is not None and is_ours(task, model.groups):
            units.setdefault(unit_of(task), []).extend(boxes_of(task, model.config))
    return list(units.values())


def slots_of(model: Model, tasks: Sequence[Any]) -> dict[str, list[Slot]]:
    """All that this rank holds, whoever exports it, by the name of parameter or buffer. Raises as `units_of`."""
    check_bridge(model)
    module = model.module
    names = {id(held): name for name, held in (*module.named_buffers(), *module.named_parameters())}
    held = [task for task in tasks if task is not None and id(task.param_weight) in names]
    return {names[id(task.param_weight)]: boxes_of(task, model.config) for task in held}


def unit_of(task: Any) -> str:
    """The name of a parameter, which those of all experts of a layer have in common."""
    return _EXPERT_NUMBER.sub(".", task.global_param_name)


def check_bridge(model: Model) -> None:
    """Raises ConfigError where weights are not exported as they are."""
    bridge = type(model.bridge._model_bridge)
    if bridge.maybe_modify_converted_hf_weight is not MegatronModelBridge.maybe_modify_converted_hf_weight:
        raise ConfigError(f"{bridge.__name__} changes weights as it exports them: they cannot be exported in shards")


def is_ours(task: Any, groups: ProcessGroupCollection) -> bool:
    """Whether this rank is the first of those that hold the parameter."""
    if is_expert(task.global_param_name):
        return groups.expt_dp.rank() == 0
    return groups.dp_cp.rank() == 0 and (partition_dim(task) is not None or groups.tp.rank() == 0)


def partition_dim(task: Any) -> int | None:
    """Along which tensor parallelism shares the parameter out; Megatron marks it on a single rank too."""
    parameter = task.param_weight
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def boxes_of(task: Any, config: Any) -> list[Slot]:
    """Of which boxes of which tensors the task's parameter is made."""
    mapping, kind = task.mapping, type(task.mapping)
    if kind in _ONE_TO_ONE and getattr(mapping, "permute_dims", None) is None:
        return [whole(task, mapping.hf_param)]
    if kind is GatedMLPMapping:
        size = len(task.param_weight) // 2
        at, total = mapping.tp_rank * size, mapping.tp_size * size
        return [
            _rows(task, mapping.hf_param["gate"], 0, size, at, total),
            _rows(task, mapping.hf_param["up"], size, size, at, total),
        ]
    if kind is QKVMapping and not getattr(config, "attention_output_gate", False):
        return _query_key_value(task, config)
    raise ConfigError(
        f"parameter {task.global_param_name}: {kind.__name__} of Megatron-Bridge cannot be exported in shards; "
        "teach trainer/megatron/slots.py where its tensors lie"
    )


def _query_key_value(task: Any, config: Any) -> list[Slot]:
    """Rows of linear_qkv: for each group of query heads the group's queries, its key and its value."""
    mapping, head = task.mapping, config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * head
    num_rows = queries + 2 * head
    num_groups, rest = divmod(len(task.param_weight), num_rows)
    if rest or num_groups * mapping.tp_size != config.num_query_groups:
        raise ConfigError(
            f"parameter {task.global_param_name}: {config.num_query_groups} query groups are not shared out evenly over"
            f" {mapping.tp_size} tensor-parallel ranks"
        )
    slots: list[Slot] = []
    for part, inside, size in (("q", 0, queries), ("k", queries, head), ("v", queries + head, head)):
        for group in range(num_groups):
            at, total = (mapping.tp_rank * num_groups + group) * size, config.num_query_groups * size
            slots.append(_rows(task, mapping.hf_param[part], group * num_rows + inside, size, at, total))
    return slots


def whole(task: Any, name: str) -> Slot:
    """All of the task's parameter, which is all of a tensor or this rank's part of it."""
    dim = partition_dim(task)
    shape, start = list(task.param_weight.shape), [0] * task.param_weight.dim()
    if dim is not None:
        start[dim] = task.mapping.tp_rank * shape[dim]
        shape[dim] *= task.mapping.tp_size
    return Slot(
        name=name,
        shape=tuple(shape),
        start=tuple(start),
        parameter=task.param_weight,
        dim=dim,
        group=_group(task),
    )


def _rows(task: Any, name: str, first: int, size: int, at: int, total: int) -> Slot:
    """Rows from `first` of a parameter, which are those from `at` of a tensor of `total` rows."""
    rest = tuple(task.param_weight.shape[1:])
    return Slot(
        name=name,
        shape=(total, *rest),
        start=(at, *(0 for _ in rest)),
        parameter=task.param_weight,
        rows=slice(first, first + size),
        dim=0,
        group=_group(task),
    )


def _group(task: Any) -> str:
    if isinstance(task.megatron_module, Router):
        return "router"
    return "norm" if isinstance(task.megatron_module, RMSNorm) else ""
