"""`trainer-python export_layouts.py --models NAME DIR DIR ... --into DIR [--cuts N]`: policies out of every layout.

For each layout of LAYOUTS `<into>/<name>/<layout>/manifest-0` and `manifest-1` are the encoded manifests of the two
models, of one architecture, as policies 0 and 1 of one trainer; their weights lie beside them, by the transport
`checkpoint`, in shards of two ranks, cut for engines on N ranks. `canary-0` and `canary-1` are a text's tokens and the
trainer's log-probabilities of them under each, as JSON. Prints what is done. `--models` may be given again. The second
rank is started by the first.
"""

import argparse
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from beamline.protocol.messages import Canary
from beamline.trainer.canary import canary_tokens
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import Model, build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.peers import TorchPeers
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.outlet import Outlet, join
from beamline.weights.choice import owner_of

WORLD_SIZE = 2
LAYOUTS = {"tp1": Layout(), "tp2": Layout(tensor=2), "ep2": Layout(expert=2), "pp2": Layout(pipeline=2)}
"""The second rank of tp1 is a data-parallel one: the first exports everything."""
DEADLINE_S = 120


def export(layout: Layout, models: tuple[Path, Path], into: Path, cuts: int) -> None:
    """This rank's shards of both models, and on rank 0 the manifests. The files stay when the process has ended."""
    model = build_model(models[0], layout)
    policy, peers = MegatronPolicy(model, AdamWSettings(), temperature=1.0), TorchPeers()
    outlet = Outlet(owner=owner_of("checkpoint", into, dist.get_rank()), cuts=cuts)
    tokens = canary_tokens(model.module.vocab_size)
    for version, path in enumerate(models):
        _load(model, path)
        if parts := peers.collect(outlet.export(version, policy)):
            (into / f"manifest-{version}").write_bytes(join(parts).encode())
        logprobs = policy.score(tokens)
        if dist.get_rank() == 0:
            canary = Canary(tokens=tokens, logprobs=logprobs)
            (into / f"canary-{version}").write_bytes(msgspec.json.encode(canary))
    peers.meet()


def _load(model: Model, path: Path) -> None:
    model.bridge.load_hf_weights([model.module], path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs=3, action="append", required=True)
    parser.add_argument("--into", type=Path, required=True)
    for name, default in (("--cuts", 1), ("--rank", 0), ("--port", 0)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    other = None
    if args.rank == 0:
        args.port = _free_port()
        other = subprocess.Popen([sys.executable, *sys.argv, "--rank", "1", "--port", str(args.port)])
    try:
        for (model, first, second), (name, layout) in product(args.models, LAYOUTS.items()):
            distributed.start(Ranks(args.rank, WORLD_SIZE, args.port), layout)
            export(layout, (Path(first), Path(second)), args.into.resolve() / model / name, args.cuts)
            distributed.leave_layout()
            if args.rank == 0:
                print(model, name, flush=True)
        distributed.stop()
        assert other is None or other.wait(DEADLINE_S) == 0
    finally:
        if other is not None:
            other.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    main()
