"""Make what the parity tests compare with: transformers' own outputs for tiny models.

    .venv/bin/python make_references.py        # writes ../parity/references/<model>[-bfloat16].safetensors

<model> has random weights. They are not kept: `tiny.build(spec, directory, seed=SEED, randomise=True)` makes them
again, and a file's metadata says so. Tensors, for S sequences of T tokens, V the vocabulary, L layers, K experts a
token:

    tokens               int64  [S, T]        longer than the sliding window
    logprobs             f32    [S, T - 1]    log-probability of each next token
    logits_positions     int64  [P]
    logits               f32    [S, P, V]     after the soft cap, at those positions
    routed_experts       int64  [S, T, L, K]  best first; zero in dense layers
    loss                 f32    []            mean of -logprobs
    grad.<name>          f32                  of the loss, under the checkpoint's names

<model>-bfloat16 is the shipped model, computed in bfloat16: the first five, with logprobs of the rounded logits. It is
a trained one, for random weights spread a rounding further than those of any model that is of use.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from beamline.models import assets, tiny

SEED = 7
NUM_SEQUENCES, NUM_TOKENS = 2, 96
LOGITS_EVERY = 12
DIRECTORY = Path(__file__).parent.parent / "parity" / "references"
MODELS = ("tiny-beam", "tiny-qwen3-moe")

_COMMON_GRADIENTS = (
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.k_norm.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.2.mlp.experts.5.gate_proj.weight",
    "model.layers.2.mlp.experts.5.up_proj.weight",
    "model.layers.3.mlp.experts.0.down_proj.weight",
)
_BEAM_GRADIENTS = (
    "model.layers.0.self_attn.gate_bias",
    "model.layers.0.post_feedforward_layernorm.weight",
    "model.layers.1.self_attn.gate_proj.weight",
    "model.layers.1.self_attn.gate_bias",
    "model.layers.3.pre_feedforward_layernorm.weight",
)
GRADIENTS = {"tiny-beam": _COMMON_GRADIENTS + _BEAM_GRADIENTS, "tiny-qwen3-moe": _COMMON_GRADIENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=DIRECTORY, help="where <model>.safetensors is written")
    into = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in MODELS:
        save_file(make(name), into / f"{name}.safetensors", metadata=metadata(name))
        save_file(make_bfloat16(name), into / f"{name}-bfloat16.safetensors", metadata={"weights": f"shipped {name}"})
        print(f"wrote {into / name}.safetensors and {name}-bfloat16.safetensors")


def metadata(name: str) -> dict[str, str]:
    """How to make the weights again."""
    return {"spec": name, "seed": str(SEED), "randomise": "true"}


def make(name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All reference tensors of one model, computed in `dtype` with the plainest attention and experts."""
    with tempfile.TemporaryDirectory() as scratch:
        tiny.build(tiny.SPECS[name], Path(scratch), seed=SEED, randomise=True)
        model = _load(scratch, dtype)
    made = _forward(model)
    made["loss"].backward()
    gradients = {f"grad.{gradient}": _gradient(model, gradient) for gradient in GRADIENTS[name]}
    return {**{tensor: values.detach() for tensor, values in made.items()}, **gradients}


def make_bfloat16(name: str) -> dict[str, torch.Tensor]:
    """The reference tensors of a shipped model in bfloat16, but for loss and gradients."""
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        made = _forward(_load(assets.materialise(name, Path(scratch)), torch.bfloat16))
    return {tensor: values for tensor, values in made.items() if tensor != "loss"}


def _load(directory: str | Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def _forward(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors but the gradients; those that have a graph keep it."""
    vocab_size = model.config.vocab_size
    tokens = torch.randint(vocab_size, (NUM_SEQUENCES, NUM_TOKENS), generator=torch.Generator().manual_seed(SEED))
    routed_experts = torch.zeros(
        NUM_SEQUENCES, NUM_TOKENS, model.config.num_hidden_layers, model.config.num_experts_per_tok, dtype=torch.int64
    )
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(_record(routed_experts[:, :, index]))
    logits = model(input_ids=tokens).logits
    scores = logits[:, :-1] if logits.dtype == torch.float64 else logits[:, :-1].float()
    logprobs = scores.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    positions = torch.arange(LOGITS_EVERY - 1, NUM_TOKENS, LOGITS_EVERY)
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "logits_positions": positions,
        "logits": logits[:, positions].contiguous(),
        "routed_experts": routed_experts,
        "loss": -logprobs.mean(),
    }


def _record(into: torch.Tensor) -> Callable[..., None]:
    """A forward hook of a router that copies its choice, [S * T, K], to `into`, [S, T, K]."""

    def hook(_module: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        into.copy_(output[2].view(into.shape))

    return hook


def _gradient(model: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter's gradient by its name in a checkpoint, where experts are not fused as they are in memory."""
    if ".experts." not in name:
        return model.get_parameter(name).grad.clone()
    experts_name, expert, projection = name.removesuffix(".weight").rsplit(".", 2)
    experts = model.get_submodule(experts_name)
    if projection == "down_proj":
        return experts.down_proj.grad[int(expert)].clone()
    gate, up = experts.gate_up_proj.grad[int(expert)].chunk(2)
    return (gate if projection == "gate_proj" else up).clone()


if __name__ == "__main__":
    main()
