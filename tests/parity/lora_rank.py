"""One rank of a trainer that computes what the adapter references hold, for models, layouts and adapters.

    python lora_rank.py --references DIR --into DIR --rank 0 --world-size 2 --port N tiny-beam:tp2 tiny-beam:ep2 ...

Reads the models `<into>/<model>` and their adapters `<into>/<model>-<variant>`, and writes
`<into>/<job>.<rank>.safetensors`. For every variant, `<variant>.` before each name:

    logprobs                 of the sequences `rows`, [S, T - 1]
    grad.<name>, grad_norm   summed over the ranks as a train step would
    wrong.export             how many tensors are missing, too many, or not bit for bit those that were loaded, in what
    wrong.shards             is gathered, and in what an engine reads of all ranks (on rank 0)

Of variant `ONE` also `stepped.<name>`, the adapters after two updates, `state_bytes` of this rank and `reference`,
log-probabilities of the reference policy. `start.<name>` are adapters as they begin, and `wrong.base` the frozen
parameters that have changed in the end.

A job may end in `:some` (with `SOME` of the variants), `:recompute` (its layers are computed twice, and routes
replayed), `:regather` (gradients and bytes kept for the backward pass with it on and off) or `:faults`
(log-probabilities with each of `FAULTS` planted).
"""

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from trainer_rank import LAYOUTS, Tensors, exported_gradients, trajectory

from beamline.algorithms.losses import PolicyLoss
from beamline.protocol.lora_config import LoraSection
from beamline.trainer.batch import MicroBatch
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Ranks
from beamline.trainer.megatron.lora import with_adapters
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.peers import TorchPeers
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.policy_files import PolicyFiles
from beamline.trainer.outlet import Outlet, join
from beamline.weights.shm import ShmOwner
from lora_variants import ALL
from trainer_weights import staged_weights

NUM_STEPS = 2
SETTINGS = AdamWSettings(eps=1e-2, weight_decay=0.1)
"""An update follows gradients in their size too: it does not magnify what layouts round differently."""
ONE = "norm-alpha2"
"""Of jobs that need no other variant."""
SOME = (ONE, "split-norm-alpha2")


class Work:
    """One job on this rank: a model without adapters, which get on it and off it again."""

    def __init__(self, model_dir: Path, layout: str, reference: Path, recompute: bool) -> None:
        self.base = build_model(model_dir, LAYOUTS[layout], recompute=recompute)
        self.model_dir = model_dir
        self._weights = [p.detach().clone() for p in self.base.module.parameters()]
        self.reference = load_file(reference)
        groups, num_rows = self.base.groups, len(self.reference["tokens"])
        self.rows = list(range(num_rows))[groups.dp.rank() :: groups.dp.size()]

    def adapted(self, lora: LoraSection) -> Model:
        """The model with fresh adapters, in the place of those that it had."""
        module = self.base.module
        for name, part in list(module.named_modules()):
            if hasattr(part, "to_wrap"):
                parent, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(parent), leaf, part.to_wrap)
        return with_adapters(self.base, lora, seed=5)

    def loaded(self, variant: str, lora: LoraSection | None = None) -> Model:
        """With the made adapters, read as a checkpoint's are."""
        model = self.adapted(lora or ALL[variant])
        assert model.adapters is not None
        held = [slot for slots in model.adapters.slots().values() for slot in slots]
        files = PolicyFiles(self.directory(variant))
        files.check(held)
        files.load(held)
        return model

    def directory(self, variant: str) -> Path:
        return self.model_dir.with_name(f"{self.model_dir.name}-{variant}")

    def micro_batches(self, routes_STLK: torch.Tensor | None = None) -> list[MicroBatch]:
        """Advantage 1 everywhere, so that the loss is the mean -logprob."""
        tokens_ST = self.reference["tokens"]
        weight = 1 / (tokens_ST.shape[0] * (tokens_ST.shape[1] - 1))
        routes = [None if routes_STLK is None else routes_STLK[row] for row in self.rows]
        pairs = zip(self.rows, routes, strict=True)
        return [MicroBatch.pack([trajectory(tokens_ST[row], own, weight)]) for row, own in pairs]

    def num_changed(self) -> int:
        """Frozen parameters that are not bit for bit as they were, or have a gradient."""
        frozen = [p for name, p in self.base.module.named_parameters() if ".adapter." not in name]
        same = [torch.equal(p, w) and p.grad is None for p, w in zip(frozen, self._weights, strict=True)]
        return same.count(False)


def policy_of(model: Model) -> MegatronPolicy:
    return MegatronPolicy(model, SETTINGS, temperature=1.0, with_reference=True)


def compute(work: Work, policy: MegatronPolicy, routes_STLK: torch.Tensor | None = None) -> Tensors:
    """The adapters are left as they were, without gradients."""
    found = policy.forward_backward(work.micro_batches(routes_STLK), None, PolicyLoss())
    return {"logprobs": torch.stack(found.logprobs), **exported_gradients(policy)}


def compare_exports(policy: MegatronPolicy, loaded: Tensors, socket: Path) -> Tensors:
    """What is gathered, and on rank 0 what an engine reads, beside what was loaded."""
    peers = TorchPeers()
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


def step(work: Work, policy: MegatronPolicy) -> Tensors:
    """Two updates, and what the reference policy says after them."""
    for _ in range(NUM_STEPS):
        policy.forward_backward(work.micro_batches(), None, PolicyLoss())
        policy.optimizer_step(1e-2)
    stepped = {f"stepped.{name}": tensor.clone() for name, tensor in policy.export()}
    stepped["reference"] = torch.stack(policy.reference_logprobs(work.micro_batches()))
    return {**stepped, "state_bytes": torch.tensor(policy._optimizer.states.num_bytes)}


def every_variant(work: Work, variants: Iterable[str], socket: Path) -> Tensors:
    found: Tensors = {}
    for variant in variants:
        policy = policy_of(work.loaded(variant))
        outputs = compare_exports(policy, load_file(work.directory(variant) / "adapters.safetensors"), socket)
        outputs |= compute(work, policy)
        outputs |= step(work, policy) if variant == ONE else {}
        found |= {f"{variant}.{name}": tensor for name, tensor in outputs.items()}
    begun = policy_of(work.adapted(ALL[ONE]))
    return found | {f"start.{name}": tensor.clone() for name, tensor in begun.export()}


def recomputed(work: Work) -> Tensors:
    """With the reference's routes replayed, in what is read without gradients too."""
    policy, routes_STLK = policy_of(work.loaded(ONE)), work.reference[f"{ONE}.routed_experts"]
    before = torch.stack(policy.logprobs(work.micro_batches(routes_STLK)))
    outputs = compute(work, policy, routes_STLK)
    torch.testing.assert_close(before, outputs["logprobs"], rtol=0, atol=1e-5)
    return {f"{ONE}.{name}": tensor for name, tensor in outputs.items()}


def regathered(work: Work) -> Tensors:
    """Gradients as `off.grad.<name>` and `on.grad.<name>`; bytes that autograd keeps, each storage once."""
    found: Tensors = {}
    for key, is_on in (("off", False), ("on", True)):
        lora = msgspec.structs.replace(ALL[ONE], sequence_parallel_input_regather=is_on)
        policy, kept = policy_of(work.loaded(ONE, lora)), dict[int, torch.UntypedStorage]()

        def keep(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.forward_backward(work.micro_batches()[:1], None, PolicyLoss())
        named = [(name, p) for name, p in policy._model.module.named_parameters() if p.requires_grad]
        found |= {f"{key}.grad.{name}": p.grad.clone() for name, p in named if p.grad is not None}
        found[f"{key}.bytes"] = torch.tensor(sum(storage.nbytes() for storage in kept.values()))
    return found


def _adapters(module: Any, ending: str) -> list[Any]:
    return [part for name, part in module.named_modules() if name.endswith(ending) and hasattr(part, "to_wrap")]


def _scale_off(work: Work) -> Model:
    model = work.loaded(ONE)
    for part in model.module.modules():
        if getattr(part, "is_expert", False) and hasattr(part, "linear_in"):
            part.alpha /= model.config.moe_router_topk
    return model


def _local_numbers(work: Work) -> Model:
    """Every rank takes its experts for the first ones, as Megatron-Bridge's export does."""
    model = work.loaded(ONE)
    assert model.adapters is not None
    num_local = model.config.num_moe_experts // model.groups.ep.size()
    for slots in model.adapters.slots().values():
        for slot in slots:
            name = re.sub(r"experts\.(\d+)", lambda found: f"experts.{int(found[1]) % num_local}", slot.name)
            PolicyFiles(work.directory(ONE)).load([replace(slot, name=name)])
    return model


def _one_a(work: Work) -> Model:
    model = work.loaded("split-norm-alpha2")
    for wrapper in _adapters(model.module, ".linear_qkv"):
        for key in ("adapter_k", "adapter_v"):
            wrapper.adapter[key].linear_in.weight.data.copy_(wrapper.adapter["adapter_q"].linear_in.weight)
    return model


def _no_gate(work: Work) -> Model:
    model = work.loaded(ONE)
    for wrapper in _adapters(model.module, ".linear_gate"):
        wrapper.disable_adapter_layers()
    return model


FAULTS: dict[str, Callable[[Work], Model]] = {
    "scale-off-by-top-k": _scale_off,
    "experts-by-local-number": _local_numbers,
    "one-a-for-q-k-v": _one_a,
    "gate-left-out": _no_gate,
}


def faulty(work: Work) -> Tensors:
    return {
        f"{name}.logprobs": torch.stack(policy_of(make(work)).logprobs(work.micro_batches()))
        for name, make in FAULTS.items()
    }


def run(job: str, args: argparse.Namespace) -> Tensors:
    name, layout, *options = job.split(":")
    work = Work(args.into / name, layout, args.references / f"{name}-lora.safetensors", "recompute" in options)
    if "recompute" in options:
        found = recomputed(work)
    elif "regather" in options:
        found = regathered(work)
    elif "faults" in options:
        found = faulty(work)
    else:
        found = every_variant(work, SOME if "some" in options else ALL, args.into / f"{args.rank}.sock")
    return {**found, "rows": torch.tensor(work.rows), "wrong.base": torch.tensor(work.num_changed())}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--references", "--into"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--rank", "--world-size", "--port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("jobs", nargs="+", help="MODEL:LAYOUT, or one with :recompute, :regather or :faults behind it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for job in args.jobs:
        distributed.start(Ranks(args.rank, args.world_size, args.port), LAYOUTS[job.split(":")[1]])
        save_file(run(job, args), args.into / f"{job}.{args.rank}.safetensors")
        distributed.leave_layout()
    distributed.stop()


if __name__ == "__main__":
    main()
