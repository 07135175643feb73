"""One rank of a trainer that computes what the reference files hold, for models and layouts one after the other.

    python trainer_rank.py --references DIR --into DIR --rank 0 --world-size 2 --port N tiny-beam:tp2 tiny-beam:ep2

Reads the models `<into>/<model>`, writes `<into>/<model>:<layout>.<rank>.safetensors`: logprobs [S, T - 1],
`grad.<name>` under Hugging Face names, summed over the ranks as a train step would, and `export.<name>`, the weights
as exported before that.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import MicroBatch, Trajectory
from beamline.trainer.megatron import distributed, gradients
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy

LAYOUTS = {
    "alone": Layout(),
    "dp2": Layout(),
    "tp2": Layout(tensor=2),
    "ep2": Layout(expert=2),
    "pp2": Layout(pipeline=2),
    "tp2ep2": Layout(tensor=2, expert=2),
}


def pack(tokens_ST: torch.Tensor) -> list[MicroBatch]:
    """One micro-batch a sequence, all tokens but the first loss tokens, advantage 1."""
    rest = tokens_ST.shape[1] - 1
    return [
        MicroBatch.pack(
            [
                Trajectory(
                    tokens=row.numpy(),
                    num_prompt_tokens=1,
                    loss_mask=np.ones(rest, dtype=bool),
                    rollout_logprobs=np.zeros(rest, np.float32),
                    advantage=1.0,
                    policy_versions=np.zeros(rest, np.int64),
                )
            ]
        )
        for row in tokens_ST
    ]


def compute(model_dir: Path, reference: Path, layout: Layout, ranks: Ranks) -> dict[str, torch.Tensor]:
    """With old_logprobs equal to logprobs and advantage 1, the loss's gradient is that of the mean -logprob."""
    tokens_ST = load_file(reference)["tokens"]
    distributed.start(ranks, layout)
    model = build_model(model_dir, layout)
    data_ranks, data_rank = model.groups.dp.size(), model.groups.dp.rank()
    policy = MegatronPolicy(model, AdamWSettings(), temperature=1.0)
    exported = {f"export.{name}": tensor.clone() for name, tensor in policy.export()}
    micro_batches = pack(tokens_ST[data_rank::data_ranks])
    logprobs = policy.logprobs(micro_batches)
    found = policy.forward_backward(micro_batches, None, PolicyLoss(), tokens_ST.shape[0] * (tokens_ST.shape[1] - 1))
    for ours, again in zip(logprobs, found.logprobs, strict=True):
        torch.testing.assert_close(ours, again, rtol=0, atol=1e-5)
    parameters = list(model.module.named_parameters())
    gradients.sum_over_ranks(parameters, model.groups)
    norm = gradients.norm(parameters, model.groups)
    for _, parameter in parameters:
        parameter.data.copy_(parameter.grad)
    return {
        "logprobs": torch.stack(found.logprobs),
        "rows": torch.arange(len(tokens_ST))[data_rank::data_ranks],
        "grad_norm": torch.tensor(norm),
        **{f"grad.{name}": tensor.clone() for name, tensor in policy.export()},
        **exported,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--references", "--into"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--rank", "--world-size", "--port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("jobs", nargs="+", help="MODEL:LAYOUT")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks(args.rank, args.world_size, args.port)
    for job in args.jobs:
        model, layout = job.split(":")
        outputs = compute(args.into / model, args.references / f"{model}.safetensors", LAYOUTS[layout], ranks)
        save_file(outputs, args.into / f"{job}.{args.rank}.safetensors")
        distributed.leave_layout()
    distributed.stop()


if __name__ == "__main__":
    main()
