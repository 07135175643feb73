"""Log-probabilities straight from hidden states, tile by tile, recomputed in backward.

The [rows, vocabulary] matrix never exists: at any time there are two tiles of it, or three where entropy is learned
from, of CHUNK_ROWS rows and as many vocabulary entries as TILE_BYTES hold. Legend: L rows, C rows of a chunk, V
vocabulary entries of this tensor-parallel rank, E those of a tile, X hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ROWS = 1024
TILE_BYTES = 16 << 20
"""Of float32. A tile of this size stays in a processor's cache while it is worked on."""


@dataclass(frozen=True)
class Head:
    """What turns a hidden state into a distribution: cap * tanh(h W^T / cap) / temperature, softmax over all ranks."""

    temperature: float
    softcap: float | None = None
    vocab_start: int = 0
    """First vocabulary entry of this rank."""
    group: Any = None
    """Tensor-parallel process group; None where the vocabulary is whole."""
    entropy_gradient: bool = False
    """Entropy is learned from: it costs the backward pass a third tile."""

    @property
    def scale(self) -> float:
        """Scores are this many times the bent logits."""
        return (self.softcap or 1.0) / self.temperature

    def bent(self, hidden_CX: Tensor, weight_EX: Tensor, out_CE: Tensor) -> Tensor:
        """tanh of the logits over the softcap, or the logits as they are; float32 [C, E], written to `out_CE`."""
        if self.softcap is None:
            return _products(hidden_CX, weight_EX, 1.0, out_CE)
        return _products(hidden_CX, weight_EX, 1 / self.softcap, out_CE).tanh_()

    def own(self, targets_C: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """The tile's column of each target (0 where it has none) and whether it has one, both [C, 1]."""
        column = targets_C[:, None] - (self.vocab_start + entries.start)
        mine = (column >= 0) & (column < entries.stop - entries.start)
        return column.where(mine, 0), mine


def _products(hidden_CX: Tensor, weight_EX: Tensor, factor: float, out_CE: Tensor) -> Tensor:
    """factor * hidden W^T in float32 whatever the model's precision: a bfloat16 logit of 20 is off by up to 0.06."""
    if hidden_CX.is_cuda and hidden_CX.dtype != torch.float32:
        return torch.mm(hidden_CX, weight_EX.t(), out_dtype=torch.float32).mul_(factor)
    return torch.addmm(out_CE, hidden_CX.float(), weight_EX.float().t(), beta=0, alpha=factor, out=out_CE)


def _add_products(sum_MX: Tensor, grad_MK: Tensor, other_KX: Tensor, factor: float) -> None:
    """Add factor * grad other to a float32 sum; the product is made in the model's precision where that is faster."""
    if other_KX.is_cuda and other_KX.dtype != torch.float32:
        sum_MX.add_(torch.mm(grad_MK.to(other_KX.dtype), other_KX, out_dtype=torch.float32), alpha=factor)
    else:
        sum_MX.addmm_(grad_MK, other_KX.float(), alpha=factor)


class _Tiling:
    """How [L, V] is cut, and room for tiles that is used again and again."""

    def __init__(self, hidden_LX: Tensor, weight_VX: Tensor) -> None:
        num_rows, num_entries = min(len(hidden_LX), CHUNK_ROWS), len(weight_VX)
        width = max(1, min(num_entries, TILE_BYTES // (4 * max(1, num_rows))))
        self.rows = list(_cut(len(hidden_LX), CHUNK_ROWS))
        self.entries = list(_cut(num_entries, width))
        self._room = hidden_LX.new_empty(3, num_rows * width, dtype=torch.float32)

    def tile(self, number: int, num_rows: int, entries: slice) -> Tensor:
        num_entries = entries.stop - entries.start
        return self._room[number, : num_rows * num_entries].view(num_rows, num_entries)


def _cut(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _row_sums(hidden_CX: Tensor, weight_VX: Tensor, targets_C: Tensor, head: Head, tiling: _Tiling) -> Tensor:
    """Of this rank's scores s, float64 [4, C]: highest, sum of e = exp(s - highest), of e (s - highest), target's s.

    In float64 tiles and ranks add up to what one float32 matrix would give, at the cost of a few numbers a row.
    """
    sums_4C = None
    for entries in tiling.entries:
        tiles = [tiling.tile(number, len(hidden_CX), entries) for number in range(2)]
        bent = head.bent(hidden_CX, weight_VX[entries], tiles[0])
        column, mine = head.own(targets_C, entries)
        chosen = bent.gather(1, column).where(mine, 0)[:, 0] * head.scale
        highest = bent.amax(1, keepdim=True) * head.scale
        below = torch.add(-highest, bent, alpha=head.scale, out=tiles[1])
        exps = torch.exp(below, out=tiles[0])
        total = exps.sum(1)
        found_4C = torch.stack((highest[:, 0], total, exps.mul_(below).sum(1), chosen)).double()
        sums_4C = found_4C if sums_4C is None else _joined(sums_4C, found_4C)
    assert sums_4C is not None
    return sums_4C


def _moved(sums_4C: Tensor, highest_C: Tensor) -> Tensor:
    """The sums as they are when scores are counted from another highest one."""
    highest, total, weighted, chosen = sums_4C
    shift = highest - highest_C
    factor = shift.exp()
    return torch.stack((highest_C, factor * total, factor * (weighted + total * shift), chosen))


def _joined(one_4C: Tensor, other_4C: Tensor) -> Tensor:
    """The sums over both vocabularies."""
    highest_C = torch.maximum(one_4C[0], other_4C[0])
    moved_4C = _moved(one_4C, highest_C)
    moved_4C[1:] += _moved(other_4C, highest_C)[1:]
    return moved_4C


def _over_ranks(sums_4L: Tensor, group: Any) -> Tensor:
    """The sums over the vocabularies of all ranks."""
    if group is None:
        return sums_4L
    highest_L = sums_4L[0].clone()
    dist.all_reduce(highest_L, op=dist.ReduceOp.MAX, group=group)
    moved_4L = _moved(sums_4L, highest_L)
    dist.all_reduce(moved_4L[1:], group=group)
    return moved_4L


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LX: Tensor, weight_VX: Tensor, targets_L: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        tiling = _Tiling(hidden_LX, weight_VX)
        found = [_row_sums(hidden_LX[r], weight_VX, targets_L[r], head, tiling) for r in tiling.rows]
        sums_4L = torch.cat(found, 1) if found else hidden_LX.new_empty(4, 0, dtype=torch.float64)
        highest, total, weighted, chosen = _over_ranks(sums_4L, head.group)
        above = total.log()
        entropy_L = (above - weighted / total).float()
        ctx.head = head
        ctx.save_for_backward(hidden_LX, weight_VX, targets_L, (highest + above).float(), entropy_L)
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy_L)
        return (chosen - highest - above).float(), entropy_L

    @staticmethod
    def backward(ctx: Any, grad_L: Tensor, grad_entropy_L: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_LX, weight_VX, targets_L, *columns = ctx.saved_tensors
        head: Head = ctx.head
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        tiling, rows_L4 = _Tiling(hidden_LX, weight_VX), torch.stack((*columns, grad_L, grad_entropy_L), 1)
        grad_hidden = torch.zeros_like(hidden_LX, dtype=torch.float32)
        grad_weight = torch.empty_like(weight_VX) if wants_weight else None
        for entries in tiling.entries:
            weight_EX = weight_VX[entries]
            grad_EX = torch.zeros_like(weight_EX, dtype=torch.float32)
            for rows in tiling.rows:
                hidden_CX = hidden_LX[rows]
                grad_CE = _grad_logits(hidden_CX, weight_EX, targets_L[rows], rows_L4[rows], head, entries, tiling)
                if wants_hidden:
                    _add_products(grad_hidden[rows], grad_CE, weight_EX, 1 / head.temperature)
                if grad_weight is not None:
                    _add_products(grad_EX, grad_CE.t(), hidden_CX, 1 / head.temperature)
            if grad_weight is not None:
                grad_weight[entries] = grad_EX
        return grad_hidden.to(hidden_LX.dtype) if wants_hidden else None, grad_weight, None, None


def _grad_logits(
    hidden_CX: Tensor,
    weight_EX: Tensor,
    targets_C: Tensor,
    row_C4: Tensor,
    head: Head,
    entries: slice,
    tiling: _Tiling,
) -> Tensor:
    """Gradient [C, E] of the logits, times the temperature; a row is its normaliser, entropy, and both gradients.

    With p = exp(score - normaliser) that of a log-probability is 1[target] - p, that of the entropy -p (log p + H).
    """
    normaliser, entropy, grad, grad_entropy = row_C4.split(1, dim=1)
    tiles = [tiling.tile(number, len(hidden_CX), entries) for number in range(3)]
    bent = head.bent(hidden_CX, weight_EX, tiles[0])
    logprobs = torch.add(-normaliser, bent, alpha=head.scale, out=tiles[1])
    if head.entropy_gradient:
        probs = torch.exp(logprobs, out=tiles[2])
        factors = logprobs.add_(entropy).mul_(grad_entropy).add_(grad)
        grad_scores = factors.mul_(probs).neg_()
    else:
        grad_scores = logprobs.exp_().mul_(-grad)
    column, mine = head.own(targets_C, entries)
    grad_scores.scatter_add_(1, column, grad * mine)
    if head.softcap is None:
        return grad_scores
    return torch.ops.aten.tanh_backward.grad_input(grad_scores, bent, grad_input=grad_scores)


def logprobs_and_entropy(hidden_LX: Tensor, weight_VX: Tensor, targets_L: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """float32 log-probability of each target, and the entropy of its distribution, both [L].

    The entropy has a gradient where `head.entropy_gradient` asks for one.

    Under tensor parallelism the gradient of `hidden_LX` is this rank's part of a sum over the ranks.
    """
    return _Logprobs.apply(hidden_LX, weight_VX, targets_L, head)  # type: ignore[no-any-return]
