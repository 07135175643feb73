"""Log-probabilities straight from hidden states, in chunks of rows, recomputed in backward.

The [rows, vocabulary] matrix never exists. Legend: L rows, C rows of a chunk, V vocabulary entries of this
tensor-parallel rank, X hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ROWS = 1024


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
    """Entropy is learned from: it costs the backward pass a second [C, V] matrix."""

    def scores(self, hidden_CX: Tensor, weight_VX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores [C, V] in float32 and, with a softcap, tanh of the capped logits."""
        logits = _products(hidden_CX, weight_VX)
        if self.softcap is None:
            return logits.div_(self.temperature), None
        squashed = logits.div_(self.softcap).tanh_()
        return squashed * (self.softcap / self.temperature), squashed

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def max_over_ranks(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def own(self, targets_C: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
        """This rank's column of each target (0 where it is another's) and whether it is this rank's."""
        local = targets_C - self.vocab_start
        mine = (local >= 0) & (local < num_entries)
        return local.where(mine, 0)[:, None], mine[:, None]


def _products(hidden_CX: Tensor, weight_VX: Tensor) -> Tensor:
    """hidden W^T in float32 whatever the model's precision: a bfloat16 logit of 20 is off by up to 0.06."""
    if hidden_CX.dtype == torch.float32:
        return hidden_CX @ weight_VX.t()
    if hidden_CX.is_cuda:
        return torch.mm(hidden_CX, weight_VX.t(), out_dtype=torch.float32)
    return hidden_CX.float() @ weight_VX.float().t()


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LX: Tensor, weight_VX: Tensor, targets_L: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = [], [], []
        for hidden, targets in zip(hidden_LX.split(CHUNK_ROWS), targets_L.split(CHUNK_ROWS), strict=True):
            scores, _ = head.scores(hidden, weight_VX)
            columns, mine = head.own(targets, scores.shape[1])
            highest = head.max_over_ranks(scores.amax(1, keepdim=True))
            chosen = head.sum_over_ranks(scores.gather(1, columns) * mine)
            weights = (scores - highest).exp_()
            total = head.sum_over_ranks(weights.sum(1, keepdim=True))
            mean_score = head.sum_over_ranks((weights * scores).sum(1, keepdim=True)) / total
            normaliser = highest + total.log()
            logprobs.append((chosen - normaliser)[:, 0])
            entropies.append((normaliser - mean_score)[:, 0])
            normalisers.append(normaliser)
        entropy_L = torch.cat(entropies)
        ctx.head = head
        ctx.save_for_backward(hidden_LX, weight_VX, targets_L, torch.cat(normalisers), entropy_L)
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy_L)
        return torch.cat(logprobs), entropy_L

    @staticmethod
    def backward(ctx: Any, grad_L: Tensor, grad_entropy_L: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_LX, weight_VX, targets_L, *normaliser_and_entropy = ctx.saved_tensors
        head: Head = ctx.head
        grad_hidden = torch.empty_like(hidden_LX)
        grad_weight = torch.zeros_like(weight_VX, dtype=torch.float32)
        rows = torch.cat([column.view(-1, 1) for column in (*normaliser_and_entropy, grad_L, grad_entropy_L)], 1)
        parts = (hidden_LX, targets_L, rows, grad_hidden)
        for hidden, targets, row, grad_out in zip(*(p.split(CHUNK_ROWS) for p in parts), strict=True):
            scores, squashed = head.scores(hidden, weight_VX)
            grad_scores = _grad_scores(scores, targets, row, head)
            if squashed is not None:
                grad_scores *= 1 - squashed * squashed
            grad_logits = grad_scores.div_(head.temperature).to(hidden.dtype)
            torch.mm(grad_logits, weight_VX, out=grad_out)
            grad_weight += grad_logits.t() @ hidden
        return grad_hidden, grad_weight.to(weight_VX.dtype), None, None


def _grad_scores(scores: Tensor, targets_C: Tensor, row_C4: Tensor, head: Head) -> Tensor:
    """Gradient [C, V] of the scores, which are overwritten; a row is its normaliser, entropy, and both gradients.

    With p = exp(score - normaliser) that of a log-probability is 1[target] - p, that of the entropy -p (log p + H).
    """
    normaliser, entropy, grad, grad_entropy = row_C4.split(1, dim=1)
    columns, mine = head.own(targets_C, scores.shape[1])
    logprobs = scores.sub_(normaliser)
    if head.entropy_gradient:
        factors = (logprobs + entropy).mul_(grad_entropy).add_(grad)
        grad_scores = logprobs.exp_().mul_(factors).neg_()
    else:
        grad_scores = logprobs.exp_().mul_(-grad)
    return grad_scores.scatter_add_(1, columns, grad * mine)


def logprobs_and_entropy(hidden_LX: Tensor, weight_VX: Tensor, targets_L: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """float32 log-probability of each target, and the entropy of its distribution, both [L].

    The entropy has a gradient where `head.entropy_gradient` asks for one.

    Under tensor parallelism the gradient of `hidden_LX` is this rank's part of a sum over the ranks.
    """
    return _Logprobs.apply(hidden_LX, weight_VX, targets_L, head)  # type: ignore[no-any-return]
