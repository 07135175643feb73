"""One rank of a trainer that computes what the reference files hold, for models and layouts one after the other.

    python trainer_rank.py --references DIR --into DIR --rank 0 --world-size 2 --port N tiny-beam:tp2 tiny-beam:ep2

Reads the models `<into>/<model>`, writes `<into>/<job>.<rank>.safetensors`: logprobs [S, T - 1], `grad.<name>` under
Hugging Face names, summed over the ranks as a train step would, and `export.<name>`, the weights as exported before
that. Then the same with the reference's routes replayed, as `replayed.logprobs` and `replayed.grad.<name>`; and
`shifted.logprobs`, with every expert's successor in its place. A job may end in `:recompute`.

`exports.<policy>.<cuts>` [2] says of two policies, cut for so many ranks of an engine, how many tensors a reader finds
in the shards of all ranks' owners, and how many of those are not bit for bit what Megatron-Bridge gathers; `moved` has
other weights than `loaded`, and the same plan. A job that ends in `:exports` does nothing else, nor does
one that ends in `:bfloat16`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from beamline.algorithms.losses import PolicyLoss
from beamline.models.routing import RoutingShape
from beamline.trainer.batch import MicroBatch, Trajectory
from beamline.trainer.megatron import distributed, gradients
from beamline.trainer.megatron.build import Model, build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.peers import TorchPeers
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.outlet import Outlet, join
from beamline.weights.shm import ShmOwner
from trainer_weights import staged_weights

LAYOUTS = {
    "alone": Layout(),
    "dp2": Layout(),
    "tp2": Layout(tensor=2),
    "ep2": Layout(expert=2),
    "pp2": Layout(pipeline=2),
    "tp2ep2": Layout(tensor=2, expert=2),
}
PIECES = (((0, 96),), ((1, 61), (0, 33)), ((1, 50),), ((0, 40), (1, 29)))
"""Micro-batches of different lengths, some of them odd: of each piece its sequence, and how many tokens it has."""

CUTS = (1, 2)
"""Tensor-parallel ranks of the engines for which weights are cut."""

Tensors = dict[str, torch.Tensor]


def trajectory(tokens_T: torch.Tensor, routes_TLK: torch.Tensor | None = None, weight: float = 1.0) -> Trajectory:
    """All tokens but the first are loss tokens, advantage 1."""
    rest = len(tokens_T) - 1
    return Trajectory(
        tokens=tokens_T.numpy(),
        num_prompt_tokens=1,
        loss_mask=np.ones(rest, dtype=bool),
        rollout_logprobs=np.zeros(rest, np.float32),
        advantage=1.0,
        policy_versions=np.zeros(rest, np.int64),
        weight=weight,
        routes=None if routes_TLK is None else routes_TLK[:rest].to(torch.uint8).numpy(),
    )


def compute(model: Model, reference: Tensors, directory: Path) -> Tensors:
    """Everything that a job writes."""
    tokens_ST, routes_STLK = reference["tokens"], reference["routed_experts"]
    shifted_STLK = (routes_STLK + 1) % RoutingShape.of(model.path).num_experts
    policy = MegatronPolicy(model, AdamWSettings(), temperature=1.0)
    rows = _own(model, range(len(tokens_ST)))
    weight = 1 / (tokens_ST.shape[0] * (tokens_ST.shape[1] - 1))

    def pack(routes: torch.Tensor | None) -> list[MicroBatch]:
        routed = [None if routes is None else routes[row] for row in rows]
        pairs = zip(rows, routed, strict=True)
        return [MicroBatch.pack([trajectory(tokens_ST[row], own, weight)]) for row, own in pairs]

    outputs = {f"export.{name}": tensor.clone() for name, tensor in policy.export()}
    outputs |= compare_exports(policy, model, directory)
    outputs["shifted.logprobs"] = torch.stack(policy.logprobs(pack(shifted_STLK)))
    _check_pieces(policy, model, reference)
    for prefix, micro_batches in (("replayed.", pack(routes_STLK)), ("", pack(None))):
        found = _update(policy, model, micro_batches)
        outputs.update({f"{prefix}{name}": tensor for name, tensor in found.items()})
    return {**outputs, "rows": torch.tensor(rows)}


def compare_exports(policy: MegatronPolicy, model: Model, directory: Path) -> Tensors:
    """On rank 0, what comes out of the shards beside what the bridge gathers. The model is left as it was."""
    peers, found, layouts = TorchPeers(), Tensors(), set[str]()
    sockets = {cuts: directory / f"rank-{dist.get_rank()}-{cuts}.sock" for cuts in CUTS}
    outlets = {cuts: Outlet(owner=ShmOwner(socket), cuts=cuts) for cuts, socket in sockets.items()}
    parameters = [parameter.data for parameter in model.module.parameters()]
    weights = [part.clone() for part in parameters]
    for version, (name, scale) in enumerate((("moved", 1.5), ("loaded", 1.0))):
        for part, weight in zip(parameters, weights, strict=True):
            part.copy_(weight * scale)
        gathered = {name: tensor.clone() for name, tensor in policy.export()}
        for cuts, outlet in outlets.items():
            if parts := peers.collect(outlet.export(version, policy)):
                manifest = join(parts)
                layouts.add(f"{cuts} {manifest.layout}")
                found[f"exports.{name}.{cuts}"] = torch.tensor(_compare(staged_weights(manifest), gathered))
            peers.meet()
    assert len(layouts) in (0, len(CUTS))
    for outlet in outlets.values():
        outlet.owner.close()
    return found


def _compare(ours: Tensors, gathered: Tensors) -> tuple[int, int]:
    names = ours.keys() | gathered.keys()
    same = [name for name in ours.keys() & gathered.keys() if _is_same(ours[name], gathered[name])]
    return len(names), len(names) - len(same)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _own[T](model: Model, items: Sequence[T]) -> Sequence[T]:
    """This data-parallel rank's."""
    return items[model.groups.dp.rank() :: model.groups.dp.size()]


def _update(policy: MegatronPolicy, model: Model, micro_batches: list[MicroBatch]) -> Tensors:
    """With old_logprobs equal to logprobs and advantage 1, the loss's gradient is that of the mean -logprob."""
    before = policy.logprobs(micro_batches)
    found = policy.forward_backward(micro_batches, None, PolicyLoss())
    for ours, again in zip(before, found.logprobs, strict=True):
        torch.testing.assert_close(ours, again, rtol=0, atol=1e-5)
    return {"logprobs": torch.stack(found.logprobs), **exported_gradients(policy)}


def exported_gradients(policy: MegatronPolicy) -> Tensors:
    """Those of what is trained, complete, under the names of its export, and their norm; they are cleared."""
    model = policy._model
    trained = [(name, parameter) for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    gradients.sum_over_ranks(trained, model.groups)
    norm = gradients.norm(trained, model.groups)
    weights = [parameter.detach().clone() for _, parameter in trained]
    for _, parameter in trained:
        assert parameter.grad is not None
        parameter.data.copy_(parameter.grad)
        parameter.grad = None
    exported = {f"grad.{name}": tensor.clone() for name, tensor in policy.export()}
    for (_, parameter), weight in zip(trained, weights, strict=True):
        parameter.data.copy_(weight)
    return {"grad_norm": torch.tensor(norm), **exported}


def _check_pieces(policy: MegatronPolicy, model: Model, reference: Tensors) -> None:
    """Beginnings of the sequences in uneven micro-batches: replayed as one, and each token counted on one rank."""

    def pack(piece: tuple[tuple[int, int], ...]) -> MicroBatch:
        parts = [(reference["tokens"][row, :end], reference["routed_experts"][row, :end]) for row, end in piece]
        return MicroBatch.pack([trajectory(tokens, routes) for tokens, routes in parts])

    own = _own(model, PIECES)
    policy.take_route_counts()
    found = policy.forward_backward([pack(piece) for piece in own], None, PolicyLoss())
    for _, parameter in model.module.named_parameters():
        parameter.grad = None
    for piece, logprobs_L in zip(own, found.logprobs, strict=True):
        expected = torch.cat([reference["logprobs"][row, : end - 1] for row, end in piece])
        torch.testing.assert_close(logprobs_L, expected, rtol=0, atol=1e-4)
    counts = policy.take_route_counts()
    num_rows = sum(end - 1 for piece in PIECES for _, end in piece)
    sparse_layers = RoutingShape.of(model.path).sparse_layers
    assert counts.pairs_L[list(sparse_layers)].tolist() == [num_rows] * len(sparse_layers)
    assert counts.metrics()["routing/fallback_share"] == 0
    assert counts.metrics()["routing/agreement"] > 0.999


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--references", "--into"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--rank", "--world-size", "--port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("jobs", nargs="+", help="MODEL:LAYOUT, or one with :recompute, :exports or :bfloat16 behind it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks(args.rank, args.world_size, args.port)
    for job in args.jobs:
        name, layout, *options = job.split(":")
        distributed.start(ranks, LAYOUTS[layout])
        model_dir = args.into / name
        if "bfloat16" in options or "exports" in options:
            model = build_model(model_dir, LAYOUTS[layout], "bfloat16" if "bfloat16" in options else "float32")
            outputs = compare_exports(MegatronPolicy(model, AdamWSettings(), temperature=1.0), model, args.into)
        else:
            model = build_model(model_dir, LAYOUTS[layout], recompute="recompute" in options)
            outputs = compute(model, load_file(args.references / f"{name}.safetensors"), args.into)
        save_file(outputs, args.into / f"{job}.{args.rank}.safetensors")
        distributed.leave_layout()
    distributed.stop()


if __name__ == "__main__":
    main()
