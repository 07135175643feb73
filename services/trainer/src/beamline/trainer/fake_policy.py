"""A policy small enough to check by hand: a table of logits, one row a preceding token, plain gradient descent."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import MicroBatch
from beamline.trainer.policy import ForwardBackward, NotFinite
from beamline.trainer.routing import RouteCounts
from beamline.trainer.shards import Slot, shards_of
from beamline.trainer.weighted_loss import LossSums, weighted_loss
from beamline.weights.tensors import Shard


class FakePolicy:
    """Implements `Policy` in float64; each token's distribution depends on the token before it alone."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table_VV = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64).requires_grad_()
        self.reference_VV = self.table_VV.detach().clone()
        self.num_updates = self.num_passes = 0

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._read(self.table_VV, micro_batch)[0] for micro_batch in micro_batches]

    def reference_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        return [self._read(self.reference_VV, micro_batch)[0] for micro_batch in micro_batches]

    def score(self, tokens: Sequence[int]) -> list[float]:
        return self.logprobs([MicroBatch.of_tokens(tokens)])[0].tolist()

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: Sequence[torch.Tensor] | None,
        loss: PolicyLoss,
        ref_logprobs: Sequence[torch.Tensor] | None = None,
    ) -> ForwardBackward:
        found: list[torch.Tensor] = []
        sums_M7: list[torch.Tensor] = []
        for index, micro_batch in enumerate(micro_batches):
            logprobs_L, entropy_L = self._read(self.table_VV, micro_batch)
            old_L = None if old_logprobs is None else old_logprobs[index]
            ref_L = None if ref_logprobs is None else ref_logprobs[index]
            part, sums = weighted_loss(loss, micro_batch, logprobs_L, entropy_L, old_L, ref_L)
            part.backward()
            found.append(logprobs_L.detach())
            sums_M7.append(sums)
        sums = LossSums(*torch.stack(sums_M7).sum(0).tolist())
        if not abs(sums.loss) < float("inf"):
            self.table_VV.grad = None
            raise NotFinite(f"loss is {sums.loss}")
        return ForwardBackward(found, sums)

    def optimizer_step(self, lr: float) -> float:
        assert self.table_VV.grad is not None
        norm = self.table_VV.grad.norm().item()
        with torch.no_grad():
            self.table_VV -= lr * self.table_VV.grad
        self.table_VV.grad = None
        self.num_updates += 1
        return norm

    def take_route_counts(self) -> RouteCounts:
        return RouteCounts.none()

    def shards(self, cuts: int, on_device: bool = False) -> Iterator[Shard]:
        table_VV = self.table_VV.detach().float()
        slot = Slot(name="table.weight", shape=table_VV.shape, start=(0, 0), parameter=table_VV, dim=0)
        return shards_of([[slot]], cuts, on_device)

    def gradient_bytes(self) -> int:
        return 0 if self.table_VV.grad is None else self.table_VV.grad.nbytes

    def save(self, directory: Path) -> None:
        self.save_weights(directory)

    def save_weights(self, directory: Path) -> None:
        save_file({"table.weight": self.table_VV.detach()}, directory / "policy" / "model.safetensors")

    def load(self, directory: Path) -> None:
        with torch.no_grad():
            self.table_VV.copy_(load_file(directory / "policy" / "model.safetensors")["table.weight"])

    def _read(self, table_VV: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_passes += 1
        before = torch.from_numpy(micro_batch.tokens_T)[torch.from_numpy(micro_batch.rows_L)]
        rows_LV = table_VV[before].log_softmax(-1)
        entropy_L = -(rows_LV.exp() * rows_LV).sum(-1)
        return rows_LV.gather(1, torch.from_numpy(micro_batch.targets_L)[:, None])[:, 0], entropy_L
