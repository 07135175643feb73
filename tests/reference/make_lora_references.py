"""Make what adapters are compared with: transformers' own outputs for tiny models with adapters merged into them.

    .venv/bin/python make_lora_references.py        # writes ../parity/references/<model>-lora.safetensors

Models and tokens are those of `make_references`, adapters those of `tests/support/made_adapters`, their kinds those of
`tests/support/lora_variants`. For S sequences of T tokens:

    tokens                        int64  [S, T]
    <variant>.logprobs            f32    [S, T - 1]  log-probability of each next token, worked out in float64
    <variant>.loss                f32    []          mean of -logprobs
    <variant>.routed_experts      uint8  [S, T, L, K]  best first; zero in dense layers
    <variant>.grad.<name>         f32                of the loss, for some tensors of the adapters: s dW A^T of a B, and
                                                     s B^T dW of an A, which is this module's share where A is shared
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from make_references import DIRECTORY, MODELS, SEED, _forward, _gradient, _load
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from beamline.models import tiny
from beamline.protocol.adapter import Adapter, adapters_of
from beamline.protocol.lora_config import LoraSection

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from lora_variants import ALL
from made_adapters import made, merged

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.self_attn.gate_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.2.mlp.experts.5.gate_proj",
    "model.layers.2.mlp.experts.5.up_proj",
    "model.layers.3.mlp.experts.12.down_proj",
)
"""Whose gradients are kept, where the model has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=DIRECTORY, help="where <model>-lora.safetensors is written")
    into = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in MODELS:
        save_file(make(name), into / f"{name}-lora.safetensors")
        print(f"wrote {into / name}-lora.safetensors")


def make(name: str) -> dict[str, torch.Tensor]:
    """All variants of one model."""
    found: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as scratch:
        base, target = Path(scratch) / "base", Path(scratch) / "merged"
        for directory in (base, target):
            tiny.build(tiny.SPECS[name], directory, seed=SEED, randomise=True)
        for variant, lora in ALL.items():
            found |= {f"{variant}.{key}": values for key, values in _make(base, target, lora, name).items()}
        found["tokens"] = _forward(_load(base, torch.float32))["tokens"]
    return found


def _make(base: Path, target: Path, lora: LoraSection, name: str) -> dict[str, torch.Tensor]:
    spec = tiny.SPECS[name]
    adapters = adapters_of(dict(spec.shapes()), lora, spec.num_experts_per_tok)
    tensors = made(adapters)
    save_arrays(merged(load_arrays(base / "model.safetensors"), adapters, tensors), target / "model.safetensors")
    # These adapters are large: in float32 the reference itself would be off by more than what is compared.
    model = _load(target, torch.float64)
    forward = _forward(model)
    forward["loss"].backward()
    found = {"logprobs": forward["logprobs"].detach(), "loss": forward["loss"].detach()}
    for adapter in adapters:
        if adapter.module in MODULES:
            found |= _gradients(
                model, adapter, {key: torch.from_numpy(tensors[key]).double() for key in adapter.shapes}
            )
    routes = forward["routed_experts"].to(torch.uint8)
    return {"routed_experts": routes, **{key: values.float() for key, values in found.items()}}


def _gradients(model: torch.nn.Module, adapter: Adapter, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the chain rule from dW of the merged weight."""
    d_w = _gradient(model, f"{adapter.module}.weight")
    return {
        f"grad.{adapter.a}": adapter.scale * tensors[adapter.b].T @ d_w,
        f"grad.{adapter.b}": adapter.scale * d_w @ tensors[adapter.a].T,
    }


if __name__ == "__main__":
    main()
