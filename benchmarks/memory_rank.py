"""One of two ranks that train tiny models and say what they hold: `benchmarks.lora_memory` starts them.

    bin/python trainer -m benchmarks.memory_rank --cases FILE --out FOLDER --rank 0 --port N

Each case is built, loaded and trained on some tokens, and its tensors are counted when the backward pass has ended.
Writes `<out>/rank-N.json`, of the cases with that rank; rank 0 does those of one rank too.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from benchmarks.memory_figures import Case, RankMemory
from benchmarks.rank_memory import layout_of
from torch import nn

from beamline.algorithms.losses import PolicyLoss
from beamline.models import assets
from beamline.trainer.batch import MicroBatch, Trajectory
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.states.device import DeviceStates

WORLD_SIZE = 2
NUM_TOKENS = 512
"""Enough for every expert to have some."""


def measured(case: Case, directory: Path, ranks: Ranks) -> RankMemory:
    """This rank's part of a case, with the model of a directory."""
    distributed.start(ranks, layout_of(case))
    model = build_model(directory, layout_of(case), case.dtype, lora=case.lora)
    kept: list[tuple[Mapping[str, nn.Parameter], DeviceStates]] = []

    def make_states(parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> DeviceStates:
        kept.append((parameters, DeviceStates(parameters, settings)))
        return kept[0][1]

    policy = MegatronPolicy(model, AdamWSettings(), 1.0, make_states=make_states)
    policy.forward_backward([_micro_batch(ranks.rank, model.config.vocab_size)], None, PolicyLoss())
    ((parameters, states),) = kept
    shared = [name for name, p in parameters.items() if states.read(name).main.data_ptr() == p.data_ptr()]
    found = RankMemory(
        rank=ranks.rank,
        stage=model.groups.pp.rank(),
        parameter_bytes=sum(p.nbytes for p in model.module.parameters()),
        gradient_bytes=policy.gradient_bytes(),
        optimizer_bytes=states.num_bytes - sum(parameters[name].nbytes for name in shared),
    )
    policy.optimizer_step(1e-3)
    distributed.leave_layout()
    return found


def _micro_batch(rank: int, vocab_size: int) -> MicroBatch:
    rest = NUM_TOKENS - 1
    return MicroBatch.pack(
        [
            Trajectory(
                tokens=np.random.default_rng(rank).integers(0, vocab_size, NUM_TOKENS),
                num_prompt_tokens=1,
                loss_mask=np.ones(rest, bool),
                rollout_logprobs=np.zeros(rest, np.float32),
                advantage=1.0,
                policy_versions=np.zeros(rest, np.int64),
                weight=1 / rest,
            )
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", required=True, type=Path, help="JSON file with the cases")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = msgspec.json.decode(options.cases.read_bytes(), type=list[Case])
    models = {
        case.model: assets.materialise(case.model.removeprefix("asset:"), options.out / f"{options.rank}" / case.model)
        for case in cases
    }
    together = [case for case in cases if case.parallel.world_size == WORLD_SIZE]
    ranks = Ranks(options.rank, WORLD_SIZE, options.port)
    found = [(case, measured(case, models[case.model], ranks)) for case in together]
    distributed.stop()
    if options.rank == 0:
        found += [(case, measured(case, models[case.model], Ranks())) for case in cases if case not in together]
        distributed.stop()
    (options.out / f"rank-{options.rank}.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
