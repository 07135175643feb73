"""Which tensors the adapters of a model are made of: worked out from the model's own, alike in every service.

A module `model.layers.0.self_attn.q_proj` with weight [out, in] has `<module>.lora_A.weight` [rank, in] and
`<module>.lora_B.weight` [out, rank]; it yields W x + scale B A x with scale = alpha / rank. Both travel and are
stored as they are trained, without the scale, but for directories in PEFT's format.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from beamline.protocol.errors import ConfigError
from beamline.protocol.lora_config import ALL_LINEAR, FUSED, TARGETS, LoraSection

A, B = "lora_A", "lora_B"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_WEIGHT = ".weight"
_ALL = ("linear_qkv", "linear_proj", "linear_gate", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The pair of matrices at one module."""

    module: str
    """Hugging Face name."""
    target: str
    """Which of the run's targets it is of."""
    rank: int
    alpha: int
    in_features: int
    out_features: int

    @property
    def a(self) -> str:
        """Name of A, whose shape is [rank, in_features]."""
        return f"{self.module}.{A}{_WEIGHT}"

    @property
    def b(self) -> str:
        """Name of B, whose shape is [out_features, rank]."""
        return f"{self.module}.{B}{_WEIGHT}"

    @property
    def scale(self) -> float:
        """Of B A x (Megatron-Bridge's rule: an expert's smaller rank makes it larger)."""
        return self.alpha / self.rank

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.module

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of both tensors, by name."""
        return {self.a: (self.rank, self.in_features), self.b: (self.out_features, self.rank)}


def adapters_of(shapes: Mapping[str, tuple[int, ...]], lora: LoraSection, top_k: int) -> list[Adapter]:
    """All adapters of a model, in the order of its tensors.

    Args:
        shapes: of every tensor of the model, by Hugging Face name, experts one by one.
        top_k: experts a token; 0 of a model without experts.

    Raises:
        ConfigError: a rank that `normalize_moe_lora` cannot divide, or a target of which the model has no layer.
    """
    modules = {name.removesuffix(_WEIGHT): shape for name, shape in shapes.items() if name.endswith(_WEIGHT)}
    kinds = {kind for name in modules if (kind := _kind(name))}
    targets = _targets(lora, kinds)
    expert_rank = _expert_rank(lora, top_k)
    found: list[Adapter] = []
    for name, shape in modules.items():
        if (target := targets.get(_kind(name))) and len(shape) == 2:
            rank = expert_rank if ".experts." in name else lora.rank
            alpha = lora.scale_numerator
            in_out = {"in_features": shape[1], "out_features": shape[0]}
            found.append(Adapter(module=name, target=target, rank=rank, alpha=alpha, **in_out))
    return found


def adapter_shapes(adapters: list[Adapter]) -> dict[str, tuple[int, int]]:
    """Every tensor of the adapters, by name."""
    return {name: shape for adapter in adapters for name, shape in adapter.shapes.items()}


def max_ranks(adapters: list[Adapter]) -> tuple[int, int]:
    """The largest rank of a layer that every token passes, and of an expert; 0 where none of them has an adapter."""
    dense = max((adapter.rank for adapter in adapters if not adapter.is_expert), default=0)
    return dense, max((adapter.rank for adapter in adapters if adapter.is_expert), default=0)


def _expert_rank(lora: LoraSection, top_k: int) -> int:
    if not lora.normalize_moe_lora or not top_k:
        return lora.rank
    if lora.rank % top_k:
        lower = lora.rank // top_k * top_k
        mend = f"{lower} or {lower + top_k}" if lower else f"{top_k}"
        raise ConfigError(
            f"model.lora.rank={lora.rank} is no multiple of the model's num_experts_per_tok={top_k}, by which "
            f"model.lora.normalize_moe_lora divides it: use rank {mend}"
        )
    return lora.rank // top_k


def _kind(module: str) -> str:
    """What `TARGETS` calls a module: without its layer and expert; empty for one of another kind."""
    kind = ".".join(_EXPERT.sub(".", module).rsplit(".", 2)[-2:])
    return kind if any(kind in kinds for kinds in TARGETS.values()) else ""


def _targets(lora: LoraSection, kinds: set[str]) -> dict[str, str]:
    """Target by kind of module, for those that the model has."""
    of_model = [target for target, wanted in TARGETS.items() if kinds & set(wanted)]
    named = [one for target in lora.targets for one in (_ALL if target == ALL_LINEAR else (target,))]
    for target in lora.targets:
        if target != ALL_LINEAR and target not in of_model:
            nearest = difflib.get_close_matches(target, of_model, n=3, cutoff=0.0)
            raise ConfigError(
                f"model.lora.targets: the model has no layer for {target!r}; the nearest that it has are "
                f"{', '.join(nearest)}"
            )
    return {kind: target for target in named for kind in TARGETS[target] if kind in kinds}


def shares_a(adapter: Adapter) -> bool:
    """Whether its A is that of the other modules of its matrix too."""
    return adapter.target in FUSED
