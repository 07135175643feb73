"""Where vLLM has a Hugging Face module's adapter: q, k and v are parts of one module, all experts of another."""

import re
from typing import NamedTuple

PARTS: dict[str, tuple[str, int]] = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "self_attn.o_proj": ("self_attn.o_proj", 0),
    "self_attn.gate_proj": ("self_attn.output_gate", 0),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
    "mlp.down_proj": ("mlp.down_proj", 0),
}
"""Of every layer: vLLM's module, and which of its parts. Beam's and Qwen3-MoE's names."""
EXPERT_PARTS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}
"""Of a layer's experts, which are one module."""
NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
"""Of modules that have more than one."""

_LAYER = re.compile(r"(.*\.layers\.(\d+))\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")


class Part(NamedTuple):
    """A place for one adapter."""

    module: str
    """vLLM's."""
    index: int
    expert: int | None
    layer: int


def part_of(module: str) -> Part | None:
    """By Hugging Face name; None of a module for which no adapter is meant."""
    if not (layer := _LAYER.fullmatch(module)):
        return None
    prefix, number, kind = layer.groups()
    if (expert := _EXPERT.fullmatch(kind)) and expert[2] in EXPERT_PARTS:
        return Part(f"{prefix}.mlp.experts", EXPERT_PARTS[expert[2]], int(expert[1]), int(number))
    if kind in PARTS:
        name, index = PARTS[kind]
        return Part(f"{prefix}.{name}", index, None, int(number))
    return None
