"""One rank of a trainer that computes what the adapter references hold, for models, adapters and layouts.

    python lora_rank.py --references DIR --into DIR --rank 0 --world-size 2 --port N tiny-beam:norm-alpha2:tp2 ...

Reads the models `<into>/<model>` and their adapters `<into>/<model>-<variant>`, and writes
`<into>/<job>.<rank>.safetensors`: `rows` and `logprobs` [S, T - 1] of them, `grad.<name>` summed over the ranks as a
train step would, and `grad_norm`; and on rank 0 `wrong.export` and `wrong.shards`, how many tensors are missing, too
many, or not bit for bit those that were loaded, in what is gathered and in what an engine reads.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from trainer_rank import LAYOUTS, Tensors, trajectory

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import MicroBatch
from beamline.trainer.megatron import distributed, gradients
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Ranks
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.peers import TorchPeers
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.policy_files import PolicyFiles
from beamline.trainer.outlet import Outlet, join
from beamline.weights.shm import ShmOwner
from lora_variants import ALL
from trainer_weights import staged_weights


def load(model: Model, directory: Path) -> None:
    """Adapters of a directory of files, as a checkpoint's are read."""
    assert model.adapters is not None
    files = PolicyFiles(directory)
    held = [slot for slots in model.adapters.slots().values() for slot in slots]
    files.check(held)
    files.load(held)


def compute(model: Model, tokens_ST: torch.Tensor) -> Tensors:
    """With old_logprobs equal to logprobs and advantage 1, the loss's gradient is that of the mean -logprob."""
    policy = MegatronPolicy(model, AdamWSettings(), temperature=1.0)
    rows = list(range(len(tokens_ST)))[model.groups.dp.rank() :: model.groups.dp.size()]
    weight = 1 / (tokens_ST.shape[0] * (tokens_ST.shape[1] - 1))
    micro_batches = [MicroBatch.pack([trajectory(tokens_ST[row], None, weight)]) for row in rows]
    found = policy.forward_backward(micro_batches, None, PolicyLoss())
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    assert all(p.grad is None for p in model.module.parameters() if not p.requires_grad)
    gradients.sum_over_ranks(named, model.groups)
    norm = gradients.norm(named, model.groups)
    for _, parameter in named:
        assert parameter.grad is not None
        parameter.data.copy_(parameter.grad)
    return {
        "rows": torch.tensor(rows),
        "logprobs": torch.stack(found.logprobs),
        "grad_norm": torch.tensor(norm),
        **{f"grad.{name}": tensor.clone() for name, tensor in policy.export()},
    }


def compare_exports(model: Model, loaded: Tensors, socket: Path) -> Tensors:
    """What is gathered, and on rank 0 what an engine reads of all ranks' shards, beside what was loaded."""
    policy, peers = MegatronPolicy(model, AdamWSettings(), temperature=1.0), TorchPeers()
    found = {"wrong.export": torch.tensor(_num_wrong(dict(policy.export()), loaded))}
    outlet = Outlet(owner=ShmOwner(socket), cuts=2)
    if parts := peers.collect(outlet.export(0, policy)):
        found["wrong.shards"] = torch.tensor(_num_wrong(staged_weights(join(parts)), loaded))
    peers.meet()
    outlet.owner.close()
    return found


def _num_wrong(ours: Tensors, loaded: Tensors) -> int:
    names = ours.keys() | loaded.keys()
    return sum(not (name in ours and name in loaded and torch.equal(ours[name], loaded[name])) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--references", "--into"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--rank", "--world-size", "--port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("jobs", nargs="+", help="MODEL:VARIANT:LAYOUT")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks(args.rank, args.world_size, args.port)
    for job in args.jobs:
        name, variant, layout = job.split(":")
        distributed.start(ranks, LAYOUTS[layout])
        model = build_model(args.into / name, LAYOUTS[layout], lora=ALL[variant])
        adapters = args.into / f"{name}-{variant}"
        load(model, adapters)
        outputs = compare_exports(
            model, load_file(adapters / "adapters.safetensors"), args.into / f"{dist.get_rank()}.sock"
        )
        outputs |= compute(model, load_file(args.references / f"{name}-lora.safetensors")["tokens"])
        save_file(outputs, args.into / f"{job}.{args.rank}.safetensors")
        distributed.leave_layout()
    distributed.stop()


if __name__ == "__main__":
    main()
