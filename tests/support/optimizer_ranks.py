"""`python optimizer_ranks.py PART ... --into DIR --rank N --port P`: one of two ranks, on recorded trajectories.

Part `straight` trains the models `<into>/<model>` at TP2 x EP2 without a stop and saves in between; part `resumed`, in
other processes, goes on from there in each layout; part `states` trains with the optimizer's state in each place.
Rank 0 writes `<into>/<part>.json`, metrics and findings by job, and `<into>/<part>.<job>.safetensors`, weights.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import Batch, MiniBatch
from beamline.trainer.megatron import distributed, gradients
from beamline.trainer.megatron.build import Model, build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.peers import TorchPeers
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.states.adam_states import MakeStates
from beamline.trainer.megatron.states.device import DeviceStates
from beamline.trainer.megatron.states.disk import DiskStates
from beamline.trainer.megatron.states.host import HostStates
from beamline.trainer.train_step import StepConfig, train_step
from trainer_batches import batch

VOCAB = 512
WORLD_SIZE = 2
SETTINGS = AdamWSettings(weight_decay=0.1, max_grad_norm=0.5)
CONFIG = StepConfig(PolicyLoss(), 10_000, 3e-3)
LAYOUTS = {
    "dp2": Layout(),
    "tp2": Layout(tensor=2),
    "ep2": Layout(expert=2),
    "pp2": Layout(pipeline=2),
    "tp2ep2": Layout(tensor=2, expert=2),
}
SAVED = {"tiny-beam": (6, 12), "tiny-qwen3-moe": (2, 4), "tiny-beam:bfloat16": (2, 3)}
"""Of each job: after which step it saves, and how many it takes."""
STEP_METRICS = ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/mismatch_mean")

type Found = dict[str, object]


def recorded(number: int) -> Batch:
    """What a step is trained on: two mini-batches of four trajectories."""
    return batch(number, VOCAB, num_trajectories=4)


def steps(policy: MegatronPolicy, model: Model, first: int, last: int) -> list[dict[str, float]]:
    """Metrics of steps first to last; each data-parallel rank takes its share of the trajectories."""
    peers = TorchPeers()
    found: list[dict[str, float]] = []
    for number in range(first, last + 1):
        stats = train_step(policy, _share(recorded(number), model), CONFIG, peers)
        metrics = stats.metrics_of(peers.gather(stats.parts()))
        found.append({name: metrics[name] for name in STEP_METRICS})
    return found


def likelihood_loss(policy: MegatronPolicy, number: int) -> float:
    """Mean negative log-probability of all that the step is trained on."""
    found = [policy.logprobs(mini.micro_batches(10_000)) for mini in recorded(number).mini_batches]
    return -torch.cat([logprobs_L for mini in found for logprobs_L in mini]).double().mean().item()


def _share(whole: Batch, model: Model) -> Batch:
    dp = model.groups.dp
    minis = tuple(MiniBatch(mini.trajectories[dp.rank() :: dp.size()]) for mini in whole.mini_batches)
    return replace(whole, mini_batches=minis)


@contextmanager
def in_layout(layout: str) -> Iterator[None]:
    distributed.start(Ranks(dist.get_rank(), WORLD_SIZE), LAYOUTS[layout])
    yield
    distributed.leave_layout()


def policy_of(
    job: str, layout: str, into: Path, make_states: MakeStates = DeviceStates
) -> tuple[MegatronPolicy, Model]:
    """In that layout, which has been started."""
    name, _, dtype = job.partition(":")
    model = build_model(into / name, LAYOUTS[layout], dtype or "float32")
    return MegatronPolicy(model, SETTINGS, 1.0, make_states=make_states), model


@in_layout("tp2ep2")
def straight(into: Path) -> dict[str, Found]:
    """Without a stop."""
    found: dict[str, Found] = {}
    for job, (saved, last) in SAVED.items():
        policy, model = policy_of(job, "tp2ep2", into)
        before = steps(policy, model, 1, saved)
        policy.save(into / f"saved.{job}")
        found[job] = {
            "next loss": likelihood_loss(policy, saved + 1),
            "steps": before + steps(policy, model, saved + 1, last),
        }
        keep(policy, into / f"straight.{job}.safetensors")
    return found


def resumed(into: Path) -> dict[str, Found]:
    """From what was saved, to the end in the same layout, and for one step in others where float32 is compared."""
    found: dict[str, Found] = {}
    for layout in ("tp2ep2", "pp2", "dp2"):
        jobs = SAVED if layout == "tp2ep2" else {job: ends for job, ends in SAVED.items() if "bfloat16" not in job}
        with in_layout(layout):
            for job, (saved, last) in jobs.items():
                policy, model = policy_of(job, layout, into)
                policy.load(into / f"saved.{job}")
                end = last if layout == "tp2ep2" else saved + 1
                found[f"{job}.{layout}"] = {
                    "next loss": likelihood_loss(policy, saved + 1),
                    "steps": steps(policy, model, saved + 1, end),
                }
                keep(policy, into / f"resumed.{job}.{layout}.safetensors")
    return {**found, "journey": journey(into)}


def journey(into: Path) -> Found:
    """Saved at TP2 x EP2, carried through other layouts and kinds of state, and back: what has changed on the way."""
    job = "tiny-beam:bfloat16"
    source, directory = into / f"saved.{job}", into / f"journey.rank-{dist.get_rank()}"
    places: tuple[MakeStates, ...] = (HostStates, partial(DiskStates, directory=directory), DeviceStates)
    for layout, make_states in zip(("pp2", "dp2", "tp2ep2"), places, strict=True):
        with in_layout(layout):
            policy, _ = policy_of(job, layout, into, make_states)
            policy.load(source)
            source = into / f"journey.{layout}"
            policy.save(source)
            policy.close()
            dist.barrier()  # the next layout reads what all have written
    with in_layout("tp2ep2"):
        policy, _ = policy_of(job, "tp2ep2", into)
        policy.load(into / f"saved.{job}")
        first = everything(policy)
        policy.load(source)
        return {"differing": differing(first, everything(policy)), "compared": total(len(first))}


def states(into: Path) -> dict[str, Found]:
    """On the device, in host memory and on a disk, and torch's own AdamW."""
    found: dict[str, Found] = {}
    with in_layout("dp2"):
        for job in ("tiny-beam", "tiny-beam:bfloat16"):
            found[f"{job}.dp2"] = compare_states(job, "dp2", into, {"device": DeviceStates, "host": HostStates})
    for layout in ("tp2", "ep2", "pp2"):
        with in_layout(layout):
            found[f"tiny-beam.{layout}"] = compare_states("tiny-beam", layout, into, {"device": DeviceStates})
    return found


def compare_states(job: str, layout: str, into: Path, places: dict[str, MakeStates]) -> Found:
    """After two steps with the state in these places, and on a disk."""
    directory = into / f"states.{layout}.{job}" / f"rank-{dist.get_rank()}"
    places = {**places, "disk": partial(DiskStates, directory=directory, bucket_bytes=1 << 20)}
    model = build_model(into / job.partition(":")[0], LAYOUTS[layout], job.partition(":")[2] or "float32")
    start = [p.detach().clone() for p in model.module.parameters()]
    metrics: dict[str, list[dict[str, float]]] = {}
    ends: dict[str, list[Tensor]] = {}
    num_bytes: list[int] = []
    for name, place in places.items():
        policy = begun_anew(model, start, place)
        metrics[name] = steps(policy, model, 1, 2)
        ends[name], num_bytes = everything(policy), own_bytes(policy)
        policy.close()
    return {
        "steps": metrics,
        "differing": {name: differing(ends["device"], end) for name, end in ends.items()},
        "state_bytes": num_bytes,
        "parameters": sum(len(p.view(-1)) for p in start),
        "differing from torch": differing_from_torch(begun_anew(model, start, DeviceStates), model),
    }


def begun_anew(model: Model, start: list[Tensor], place: MakeStates) -> MegatronPolicy:
    """A policy of a model that gets these weights."""
    for parameter, weights in zip(model.module.parameters(), start, strict=True):
        parameter.data.copy_(weights)
    return MegatronPolicy(model, SETTINGS, 1.0, make_states=place)


def everything(policy: MegatronPolicy) -> list[Tensor]:
    """Copies of this rank's weights, and of the main weights and moments that it keeps."""
    states = [policy._optimizer.states.read(name) for name in policy._optimizer.own]
    kept = [tensor for state in states for tensor in (state.main, state.exp_avg, state.exp_avg_sq)]
    return [tensor.detach().clone() for tensor in (*policy._model.module.parameters(), *kept)]


def differing(one: list[Tensor], other: list[Tensor]) -> int:
    """On all ranks: tensors that are not the same bit for bit."""
    return total(sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True)))


def differing_from_torch(policy: MegatronPolicy, model: Model) -> int:
    """After two updates: weights that torch's fused AdamW, which knows of no ranks, leaves otherwise."""
    parameters = dict(model.module.named_parameters())
    main = {name: p.detach().float().clone().requires_grad_() for name, p in parameters.items()}
    groups = [
        {"params": [p for p in main.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in main.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=CONFIG.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)
    for number in (1, 2):
        micro_batches = _share(recorded(number), model).mini_batches[0].micro_batches(10_000)
        policy.forward_backward(micro_batches, None, PolicyLoss())
        for name, parameter in parameters.items():
            main[name].grad = None if parameter.grad is None else parameter.grad.clone()
            for mark in ("sequence_parallel", "tensor_model_parallel"):
                setattr(main[name], mark, getattr(parameter, mark, False))
        gradients.sum_over_ranks(list(main.items()), model.groups)
        norm = gradients.norm(list(main.items()), model.groups)
        assert norm > SETTINGS.max_grad_norm, f"a norm of {norm} is not clipped"
        gradients.scale(main.values(), SETTINGS.max_grad_norm / norm)
        adamw.step()
        assert policy.optimizer_step(CONFIG.lr) == norm
    return total(sum(not torch.equal(p, main[name].to(p.dtype)) for name, p in parameters.items()))


def total(count: int) -> int:
    found = torch.tensor(count)
    dist.all_reduce(found)
    return int(found)


def own_bytes(policy: MegatronPolicy) -> list[int]:
    """Of each rank's states."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD_SIZE)]
    dist.all_gather(found, torch.tensor([policy._optimizer.states.num_bytes]))
    return [int(one) for one in found]


def keep(policy: MegatronPolicy, path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in policy.export()}
    if dist.get_rank() == 0:
        save_file(weights, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", choices=PARTS, nargs="+")
    parser.add_argument("--into", type=Path, required=True)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    distributed.start(Ranks(args.rank, WORLD_SIZE, args.port), Layout())
    distributed.leave_layout()
    for part in args.parts:
        found = PARTS[part](args.into)
        if args.rank == 0:
            (args.into / f"{part}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.stop()


PARTS = {"straight": straight, "resumed": resumed, "states": states}

if __name__ == "__main__":
    main()
