"""`python lora_ranks.py PART --into DIR --rank N --world-size W --port P`: adapters trained, saved and gone on with.

Part `straight` trains adapters of `<into>/<model>` for LAST steps without a stop and saves after SAVED of them, in the
first of the world's layouts; part `resumed`, in other processes, goes on from there: to the end in that layout, and for
one step in the other. Rank 0 writes `<into>/<part>.<W>.json`, findings by layout, `<into>/<part>.<layout>.safetensors`,
adapters, and `<into>/end.<part>.<layout>`, a checkpoint.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from beamline.protocol.lora_config import LoraSection
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.policy import MegatronPolicy
from optimizer_ranks import LAYOUTS, SETTINGS, Found, keep, likelihood_loss, steps

SAVED, LAST, SEED = 2, 4, 5
TP1 = "tp1"
JOBS = {1: (TP1,), 2: ("tp2ep2", "pp2")}
"""Layouts by the number of ranks."""
LORA = {
    1: LoraSection(rank=8, alpha=16, normalize_moe_lora=True, dropout=0.2),
    2: LoraSection(rank=8, alpha=16, normalize_moe_lora=True),
}
"""With dropout where nothing is compared between layouts: a rank's own numbers go on too."""
MODELS = {1: "tiny-qwen3-moe", 2: "tiny-beam"}


def policy_of(layout: Layout, into: Path) -> tuple[MegatronPolicy, Model]:
    world_size = dist.get_world_size()
    model = build_model(into / MODELS[world_size], layout, lora=LORA[world_size], seed=SEED)
    return MegatronPolicy(model, SETTINGS, 1.0), model


def straight(into: Path, name: str, layout: Layout) -> Found:
    policy, model = policy_of(layout, into)
    before = steps(policy, model, 1, SAVED)
    policy.save(into / f"saved.{name}")
    found: Found = {"next loss": likelihood_loss(policy, SAVED + 1)}
    found["steps"] = before + steps(policy, model, SAVED + 1, LAST)
    keep(policy, into / f"straight.{name}.safetensors")
    policy.save(into / f"end.straight.{name}")
    return found


def resumed(into: Path, name: str, layout: Layout) -> Found:
    source = JOBS[dist.get_world_size()][0]
    policy, model = policy_of(layout, into)
    policy.load(into / f"saved.{source}")
    found: Found = {"next loss": likelihood_loss(policy, SAVED + 1)}
    found["steps"] = steps(policy, model, SAVED + 1, LAST if name == source else SAVED + 1)
    keep(policy, into / f"resumed.{name}.safetensors")
    policy.save(into / f"end.resumed.{name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("straight", "resumed"))
    parser.add_argument("--into", type=Path, required=True)
    for name in ("--rank", "--world-size", "--port"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = JOBS[args.world_size][:1] if args.part == "straight" else JOBS[args.world_size]
    found: dict[str, Found] = {}
    for name in names:
        layout = LAYOUTS.get(name, Layout())
        distributed.start(Ranks(args.rank, args.world_size, args.port), layout)
        found[name] = (straight if args.part == "straight" else resumed)(args.into, name, layout)
        distributed.leave_layout()
    if args.rank == 0:
        (args.into / f"{args.part}.{args.world_size}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.stop()


if __name__ == "__main__":
    main()
