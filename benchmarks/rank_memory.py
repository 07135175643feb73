"""What each rank of the trainer would hold of a model, computed from shapes.

The trainer's own model is built on torch's meta device, where tensors have shapes and no memory, in the process groups
that a rank would have, in which nothing is ever sent.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.memory_figures import Case, CaseMemory, RankMemory
from benchmarks.model_shapes import ModelShapes
from torch import Tensor, nn

from beamline.protocol.adapter import Adapter, adapters_of
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import AutoBridge, ProcessGroupCollection, unloaded_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.lora import attach
from beamline.trainer.megatron.owners import Owners

FLOAT32_BYTES = 4


def layout_of(case: Case) -> Layout:
    """The trainer's."""
    return Layout(tensor=case.parallel.tensor, expert=case.parallel.expert, pipeline=case.parallel.pipeline)


def computed(case: Case, shapes: ModelShapes) -> CaseMemory:
    """Every rank of a case. This process must not have joined any ranks.

    Raises:
        ConfigError: adapters that the model cannot have.
    """
    adapters = adapters_of(shapes.tensors, case.lora, shapes.top_k) if case.lora.is_on else []
    stages: dict[int, dict[str, nn.Parameter]] = {}
    ranks: list[RankMemory] = []
    for rank in range(case.parallel.world_size):
        with _as_if(rank, case):
            groups = ProcessGroupCollection.use_mpu_process_groups()
            stage = groups.pp.rank()
            if stage not in stages:  # all of its ranks have parameters of the same names and shapes
                stages[stage] = _without_memory(case, shapes, adapters)
            ranks.append(_of_rank(rank, stages[stage], groups))
    return CaseMemory(case=case, ranks=ranks)


def _of_rank(rank: int, parameters: Mapping[str, nn.Parameter], groups: ProcessGroupCollection) -> RankMemory:
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    return RankMemory(
        rank=rank,
        stage=groups.pp.rank(),
        parameter_bytes=sum(p.nbytes for p in parameters.values()),
        gradient_bytes=sum(p.numel() for p in trained.values()) * FLOAT32_BYTES,
        optimizer_bytes=sum(_state_bytes(p) for p in Owners(trained, groups).own.values()),
    )


def _state_bytes(parameter: Tensor) -> int:
    num_tensors = 2 if parameter.dtype == torch.float32 else 3
    return num_tensors * FLOAT32_BYTES * parameter.numel()


@contextmanager
def _as_if(rank: int, case: Case) -> Iterator[None]:
    """Process groups as that rank has them."""
    world_size = case.parallel.world_size
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        distributed.start(Ranks(rank, world_size), layout_of(case))
        yield
    finally:
        distributed.stop()


def _without_memory(case: Case, shapes: ModelShapes, adapters: list[Adapter]) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        model = unloaded_model(AutoBridge.from_hf_config(shapes.config), Path(), layout_of(case), case.dtype)
        if adapters:
            attach(model.module, case.lora, adapters)
    return dict(model.module.named_parameters())
