"""Tiny Beam and Qwen3-MoE models as Hugging Face directories, built without torch.

    from beamline.models import tiny
    tiny.build(tiny.TINY_BEAM, Path("models/beam"), seed=0)                      # 1.7 M parameters, float32
    tiny.build(tiny.TINY_QWEN3_MOE, Path("models/qwen"), seed=0, dtype="bfloat16")
    tiny.build(tiny.BENCH_BEAM, Path("models/bench"), seed=0)                    # 2.6 M parameters, 6 layers
    tiny.build(tiny.TINY_BEAM, Path("models/parity"), seed=7, randomise=True)    # nothing is one or zero

A directory holds config.json, model.safetensors, generation_config.json, tokenizer.json,
tokenizer_config.json and chat_template.jinja. Other shapes: `dataclasses.replace(TINY_BEAM, ...)`.
`SPECS` has the three by name. Weights depend on seed and tensor name only, never on order.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beamline.models import checkpoint_file, tokenizer

DType = Literal["float32", "bfloat16"]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

ROPE_THETA = 10_000.0
RMS_NORM_EPS = 1e-6
# Beam's post-normed branches have unit size: embeddings much smaller than one would drown in them.
EMBEDDING_STD = 1.0
HEAD_STD = 0.02
# Large enough that a forgotten soft cap shows.
RANDOMISED_HEAD_STD = 0.2
WEIGHT_STD = 0.08


@dataclass(frozen=True, kw_only=True)
class TinyBeam:
    """Shape of a Beam model; `layer_types` gives the depth, `num_dense_layers` of them are not MoE."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention") * 2
    num_dense_layers: int = 1
    sliding_window: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    final_logit_softcapping: float = 30.0
    max_position_embeddings: int = 8192

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def config(self) -> dict[str, Any]:
        """The architecture's part of config.json."""
        return {
            "architectures": ["BeamForCausalLM"],
            "model_type": "beam",
            **_common_config(self),
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_theta": ROPE_THETA, "rope_type": "default"},
            },
            "layer_types": list(self.layer_types),
            "mlp_layer_types": [
                "dense" if layer < self.num_dense_layers else "sparse" for layer in range(self.num_layers)
            ],
            "sliding_window": self.sliding_window,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "routed_scaling_factor": self.routed_scaling_factor,
            "final_logit_softcapping": self.final_logit_softcapping,
        }

    def shapes(self) -> Shapes:
        """Every tensor's name and shape, as transformers saves them."""
        yield from _outer_shapes(self)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield from _attention_shapes(self, prefix)
            yield f"{prefix}.self_attn.gate_proj.weight", (self.num_attention_heads * self.head_dim, self.hidden_size)
            yield f"{prefix}.self_attn.gate_bias", (self.num_attention_heads,)
            for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                yield f"{prefix}.{norm}.weight", (self.hidden_size,)
            if layer < self.num_dense_layers:
                yield from _mlp_shapes(f"{prefix}.mlp", self.hidden_size, self.intermediate_size)
            else:
                yield from _moe_shapes(self, prefix)
                yield f"{prefix}.mlp.gate.e_score_correction_bias", (self.num_experts,)


@dataclass(frozen=True, kw_only=True)
class TinyQwen3Moe:
    """Shape of a Qwen3-MoE model: every layer is sparse and attends to everything before it."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    max_position_embeddings: int = 8192

    def config(self) -> dict[str, Any]:
        """The architecture's part of config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **_common_config(self),
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
        }

    def shapes(self) -> Shapes:
        """Every tensor's name and shape, as transformers saves them."""
        yield from _outer_shapes(self)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield from _attention_shapes(self, prefix)
            yield from _moe_shapes(self, prefix)


Spec = TinyBeam | TinyQwen3Moe

TINY_BEAM = TinyBeam()
TINY_QWEN3_MOE = TinyQwen3Moe()
BENCH_BEAM = TinyBeam(layer_types=("sliding_attention", "sliding_attention", "full_attention") * 2, sliding_window=128)
SPECS: dict[str, Spec] = {"tiny-beam": TINY_BEAM, "tiny-qwen3-moe": TINY_QWEN3_MOE, "bench": BENCH_BEAM}


def num_parameters(spec: Spec) -> int:
    """Number of stored values, routers' correction biases included."""
    return sum(int(np.prod(shape)) for _, shape in spec.shapes())


def build(spec: Spec, directory: Path, seed: int, dtype: DType = "float32", randomise: bool = False) -> None:
    """Write a model with random weights, its configuration and its tokenizer into `directory`.

    Routers stay float32 when dtype is "bfloat16". Norms are one and biases zero, unless `randomise`
    gives them values of their own so that a test cannot pass by leaving them out.
    Raises ValueError if the vocabulary is smaller than the tokenizer's.
    """
    if spec.vocab_size < tokenizer.VOCAB_SIZE:
        raise ValueError(f"vocab_size {spec.vocab_size} is below the tokenizer's {tokenizer.VOCAB_SIZE}: raise it")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _initial(name, shape, seed, randomise) for name, shape in spec.shapes()}
    dtypes = {name: "float32" if keeps_float32(name) else dtype for name in tensors}
    checkpoint_file.write(directory / "model.safetensors", tensors, dtypes)
    write_description(spec, directory, dtype)


def write_description(spec: Spec, directory: Path, dtype: DType) -> None:
    """Write all of a model's directory but its weights, which are stored as `dtype`."""
    token_ids = {"eos_token_id": tokenizer.END_OF_TURN_ID, "pad_token_id": tokenizer.PAD_ID, "bos_token_id": None}
    _write_json(directory / "config.json", {**spec.config(), **token_ids, "dtype": dtype})
    generation = {**token_ids, "eos_token_id": [tokenizer.END_OF_TURN_ID, tokenizer.PAD_ID], "do_sample": True}
    _write_json(directory / "generation_config.json", generation)
    tokenizer.write(directory)


def keeps_float32(name: str) -> bool:
    """Whether a tensor stays float32 in a bfloat16 checkpoint: routers and their correction biases."""
    return ".mlp.gate." in name


def _initial(name: str, shape: tuple[int, ...], seed: int, randomise: bool) -> np.ndarray:
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = generator.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise if randomise else np.ones(shape, np.float32)
    if name.endswith("bias"):
        return 0.1 * noise if randomise else np.zeros(shape, np.float32)
    if name == "model.embed_tokens.weight":
        return EMBEDDING_STD * noise
    if name == "lm_head.weight":
        return (RANDOMISED_HEAD_STD if randomise else HEAD_STD) * noise
    return WEIGHT_STD * noise


def _common_config(spec: Spec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "norm_topk_prob": True,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": RMS_NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "output_router_logits": False,
        "use_cache": True,
    }


def _outer_shapes(spec: Spec) -> Shapes:
    yield "model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
    yield "model.norm.weight", (spec.hidden_size,)
    yield "lm_head.weight", (spec.vocab_size, spec.hidden_size)


def _attention_shapes(spec: Spec, prefix: str) -> Shapes:
    query_size, key_size = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    yield f"{prefix}.self_attn.q_proj.weight", (query_size, spec.hidden_size)
    yield f"{prefix}.self_attn.k_proj.weight", (key_size, spec.hidden_size)
    yield f"{prefix}.self_attn.v_proj.weight", (key_size, spec.hidden_size)
    yield f"{prefix}.self_attn.o_proj.weight", (spec.hidden_size, query_size)
    for norm in ("q_norm", "k_norm"):
        yield f"{prefix}.self_attn.{norm}.weight", (spec.head_dim,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", (spec.hidden_size,)


def _moe_shapes(spec: Spec, prefix: str) -> Shapes:
    yield f"{prefix}.mlp.gate.weight", (spec.num_experts, spec.hidden_size)
    for expert in range(spec.num_experts):
        yield from _mlp_shapes(f"{prefix}.mlp.experts.{expert}", spec.hidden_size, spec.moe_intermediate_size)


def _mlp_shapes(prefix: str, hidden_size: int, intermediate_size: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (intermediate_size, hidden_size)
    yield f"{prefix}.up_proj.weight", (intermediate_size, hidden_size)
    yield f"{prefix}.down_proj.weight", (hidden_size, intermediate_size)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
