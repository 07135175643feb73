"""Sequences laid end to end, and attention over them.

Legend: T tokens of all sequences, H query heads and G key-value heads of this rank, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from beamline.trainer.megatron.replay import Routes

SCALED_QUERY_LENGTH = 2048
SCALED_QUERY_EXPONENT = 0.1


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packing parameters with what our attention needs, computed once a micro-batch."""

    lengths: tuple[int, ...] = ()
    positions_T: Tensor = field(default_factory=lambda: torch.empty(0))
    """float32: each token's position in its own sequence."""
    routes: Routes | None = None
    """Which experts to replay; None routes every token live."""
    _rotations: dict[tuple[float, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "PackedSequences":
        positions_T = torch.cat([torch.arange(length, dtype=torch.float32) for length in lengths]).to(device)
        return cls(qkv_format="thd", lengths=tuple(lengths), positions_T=positions_T)

    def rotation(self, theta: float, head_dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary angles, each [T, 1, D / 2] in float32."""
        key = (theta, head_dim)
        if key not in self._rotations:
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=self.positions_T.device) / head_dim
            angles = self.positions_T[:, None, None] * (1.0 / theta**exponents)
            self._rotations[key] = (angles.cos(), angles.sin())
        return self._rotations[key]

    def query_scale(self) -> Tensor:
        """Scalable softmax, (1 + (position + 1) / 2048) ** 0.1, [T, 1, 1] in float32."""
        ratio = (self.positions_T + 1) / SCALED_QUERY_LENGTH
        return torch.exp(SCALED_QUERY_EXPONENT * torch.log1p(ratio))[:, None, None]


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends."""

    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None sees all."""
    rope_theta: float | None = None
    """None is no positional encoding."""
    scaled_queries: bool = False


class PackedAttention(MegatronModule):
    """Causal attention within each sequence, by torch's SDPA, one call a sequence.

    It owns everything that depends on positions (rotation, query scale, window), since positions restart
    with every packed sequence.
    """

    def __init__(
        self, config: TransformerConfig, rule: AttentionRule, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.rule = rule
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **kwargs: Any
    ) -> Tensor:
        """query [T, H, D], key and value [T, G, D] -> [T, H * D]."""
        packed: PackedSequences = kwargs["packed_seq_params"]
        if self.rule.rope_theta is not None:
            cos, sin = packed.rotation(self.rule.rope_theta, query.shape[-1])
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        if self.rule.scaled_queries:
            query = (query.float() * packed.query_scale()).to(query.dtype)
        grouped = query.shape[1] != key.shape[1]
        attend = partial(F.scaled_dot_product_attention, scale=self.softmax_scale, enable_gqa=grouped)
        outputs, columns = [], (query, key, value)
        for q, k, v in zip(*(column.split(packed.lengths) for column in columns), strict=True):
            q, k, v = (rows.transpose(0, 1)[None] for rows in (q, k, v))
            window = self.rule.window
            if window is None or q.shape[2] <= window:
                out = attend(q, k, v, is_causal=True)
            else:
                out = attend(q, k, v, attn_mask=_band(q.shape[2], window, q.device))
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension against each other, in float32, and cast back."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@cache
def _band_square(size: int, window: int, device: torch.device) -> Tensor:
    rows = torch.arange(size, device=device)
    behind = rows[:, None] - rows[None, :]
    return (behind >= 0) & (behind < window)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Boolean [length, length]: a token sees itself and the window - 1 before it. Cached by the power of two."""
    size = 1 << (length - 1).bit_length()
    return _band_square(size, window, device)[:length, :length]
