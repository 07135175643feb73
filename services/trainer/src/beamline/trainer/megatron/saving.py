"""A rank's share of a checkpoint: policy, optimizer state and random generators, written by all ranks together.

policy/ or adapter/                     what is trained, under Hugging Face names, written by rank 0
optimizer/rank-N.{state,json}           main weights and moments of what rank N looks after
optimizer/rank-N.slots.json             of which tensors that is
rng/rank-N.safetensors
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from beamline.trainer.megatron.model import Trained
from beamline.trainer.megatron.optimizer import ShardedAdamW
from beamline.trainer.megatron.rng import load_rng, save_rng
from beamline.trainer.megatron.state_slots import write_slots
from beamline.trainer.megatron.state_source import StateSource
from beamline.trainer.shards import Slot

OPTIMIZER, RNG = "optimizer", "rng"


def save(directory: Path, trained: Trained, optimizer: ShardedAdamW) -> None:
    """Write this rank's files; the state of no parameter is written twice."""
    try:
        _save_own(directory, optimizer, trained.slots())
    finally:
        save_weights(directory, trained)  # also where this rank has failed: the others wait for its part


def save_weights(directory: Path, trained: Trained) -> None:
    """Write the policy's weights alone. The export gathers: every rank takes part."""
    exported = trained.export()
    if dist.get_rank() == 0:
        trained.folder.write(exported, directory)
    for _ in exported:
        pass


def _save_own(directory: Path, optimizer: ShardedAdamW, slots: Mapping[str, Sequence[Slot]]) -> None:
    rank = dist.get_rank()
    for name in (OPTIMIZER, RNG):
        (directory / name).mkdir(parents=True, exist_ok=True)
    stem = f"rank-{rank:05d}"
    optimizer.states.write(directory / OPTIMIZER, stem)
    write_slots(directory / OPTIMIZER, stem, {name: slots[name] for name in optimizer.own})
    save_rng(directory / RNG, rank)


def load(directory: Path, trained: Trained, optimizer: ShardedAdamW) -> None:
    """Take over what `save` wrote, in any layout.

    Raises WeightError, before anything has changed, for what is missing, damaged or of another model.
    """
    slots = trained.slots()
    held = [slot for found in slots.values() for slot in found]
    policy, source = trained.folder.open(directory), StateSource(directory / OPTIMIZER)
    policy.check(held)
    source.check(slot for name in optimizer.own for slot in slots[name])
    policy.load(held)
    own = ((name, source.gather(parameter, slots[name])) for name, parameter in optimizer.own.items())
    optimizer.load(own, source.num_steps)
    load_rng(directory / RNG, dist.get_rank(), dist.get_world_size())
