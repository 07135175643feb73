"""Adapters whose every matrix differs from every other and none of which is zero: made from the tensors' names alone.

Whoever makes them, in whatever order, of whatever part of a model, makes the same ones.
"""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from beamline.protocol.adapter import Adapter, shares_a

STD_A, STD_B = 0.3, 0.15
"""Large enough that log-probabilities differ by whole units from the model's own."""
_MATRIX = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "up_proj": "fc1"}
"""Modules that share an A with others of their layer, by the name under which that is made."""


def made(adapters: Sequence[Adapter], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the adapters, float32, by name."""
    found: dict[str, np.ndarray] = {}
    for adapter in adapters:
        found[adapter.a] = _normal(_source_of_a(adapter), adapter.shapes[adapter.a], STD_A, seed)
        found[adapter.b] = _normal(adapter.b, adapter.shapes[adapter.b], STD_B, seed)
    return found


def merged(
    weights: Mapping[str, np.ndarray], adapters: Sequence[Adapter], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The weights with W + scale B A in the place of every adapted W, worked out in float64."""
    found = dict(weights)
    for adapter in adapters:
        a, b = tensors[adapter.a].astype(np.float64), tensors[adapter.b].astype(np.float64)
        name = f"{adapter.module}.weight"
        found[name] = (found[name] + adapter.scale * b @ a).astype(np.float32)
    return found


def _source_of_a(adapter: Adapter) -> str:
    layer, _, kind = adapter.module.rpartition(".")
    if not shares_a(adapter):
        return adapter.a
    return f"{layer}.{_MATRIX.get(kind, 'fc1')}.lora_A"


def _normal(name: str, shape: tuple[int, int], std: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (std * generator.standard_normal(shape)).astype(np.float32)
