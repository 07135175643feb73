"""The real policy: a Megatron model of one rank, its optimizer, and the ranks' agreement on what they found.

All ranks call the same methods in the same order. Legend: L loss tokens of a micro-batch, T its tokens, X
hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from beamline.algorithms.losses import PolicyLoss
from beamline.models.routing import RoutingShape
from beamline.trainer.batch import MicroBatch
from beamline.trainer.megatron import saving
from beamline.trainer.megatron.all_weights import AllWeights
from beamline.trainer.megatron.head import Head, logprobs_and_entropy
from beamline.trainer.megatron.model import Model, Trained
from beamline.trainer.megatron.optimizer import AdamWSettings, ShardedAdamW
from beamline.trainer.megatron.packed import PackedSequences
from beamline.trainer.megatron.replay import RouteCounter, Routes
from beamline.trainer.megatron.states.adam_states import MakeStates
from beamline.trainer.megatron.states.device import DeviceStates
from beamline.trainer.policy import ForwardBackward, NotFinite
from beamline.trainer.routing import RouteCounts
from beamline.trainer.shards import Slot, shards_of
from beamline.trainer.weighted_loss import LossSums, weighted_loss
from beamline.weights.tensors import Shard


@dataclass(frozen=True)
class _Work:
    """A micro-batch, with what was read of it before."""

    micro_batch: MicroBatch
    head: Head
    old_logprobs_L: Tensor | None = None
    ref_logprobs_L: Tensor | None = None
    counter: RouteCounter | None = None


class MegatronPolicy:
    """Implements `beamline.trainer.policy.Policy`.

    Args:
        with_reference: keep the weights as they are now for `reference_logprobs`, which takes their memory once more
            unless adapters alone are trained.
        make_states: where the optimizer keeps main weights and moments.
    """

    def __init__(
        self,
        model: Model,
        settings: AdamWSettings,
        temperature: float,
        with_reference: bool = False,
        make_states: MakeStates = DeviceStates,
    ) -> None:
        self.num_passes = 0
        self._model = model
        self._trained: Trained = model.adapters or AllWeights(model)
        self._reference = self._trained.reference() if with_reference else None
        self._optimizer = ShardedAdamW(model.module, model.groups, settings, make_states)
        tp = model.groups.tp
        num_entries = model.module.vocab_size // tp.size()
        self._head = Head(
            temperature=temperature,
            softcap=getattr(model.config, "final_logit_softcapping", None),
            vocab_start=num_entries * tp.rank(),
            group=tp if tp.size() > 1 else None,
        )
        self._device = next(model.module.parameters()).device
        self._dropouts = [part for part in model.module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        self._route_counter = RouteCounter(RoutingShape.of(model.path).num_layers, self._device)

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return self._forward_only([_Work(m, self._head, counter=self._route_counter) for m in micro_batches])

    def reference_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        assert self._reference is not None, "the policy was made without a reference"
        with self._reference.in_place():
            return self._forward_only([_Work(m.live(), self._head) for m in micro_batches])

    def score(self, tokens: Sequence[int]) -> list[float]:
        found = self._forward_only([_Work(MicroBatch.of_tokens(tokens), replace(self._head, temperature=1.0))])
        return found[0].tolist()

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: Sequence[Tensor] | None,
        loss: PolicyLoss,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> ForwardBackward:
        nothing = [None] * len(micro_batches)
        columns = (micro_batches, old_logprobs or nothing, ref_logprobs or nothing)
        # Each token's route is counted once, under the weights of the step's start.
        counter = self._route_counter if old_logprobs is None else None
        head = replace(self._head, entropy_gradient=loss.entropy_coefficient > 0)
        work = [_Work(m, head, old, ref, counter) for m, old, ref in zip(*columns, strict=True)]
        found = self._run(work, partial(_loss, policy_loss=loss), forward_only=False)
        parts = [sums for _, sums in found] or [torch.zeros(len(LossSums._fields), dtype=torch.float64)]
        sums = LossSums(*self._from_last_stage(torch.stack(parts).sum(0)).tolist())
        if not abs(sums.loss) < float("inf"):
            self._optimizer.clear()
            raise NotFinite(f"loss is {sums.loss}")
        logprobs = self._share([logprobs for logprobs, _ in found], micro_batches)
        return ForwardBackward(logprobs, sums, sum(self._num_missing(m) for m in micro_batches))

    def optimizer_step(self, lr: float) -> float:
        return self._optimizer.step(lr)

    def take_route_counts(self) -> RouteCounts:
        return self._route_counter.take()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        return self._trained.export()

    def shards(self, cuts: int, on_device: bool = False) -> Iterator[Shard]:
        return shards_of(self._units, cuts, on_device)

    @cached_property
    def _units(self) -> list[list[Slot]]:
        return self._trained.units()

    def gradient_bytes(self) -> int:
        return self._optimizer.gradient_bytes()

    def save(self, directory: Path) -> None:
        saving.save(directory, self._trained, self._optimizer)

    def save_weights(self, directory: Path) -> None:
        saving.save_weights(directory, self._trained)

    def load(self, directory: Path) -> None:
        saving.load(directory, self._trained, self._optimizer)

    def close(self) -> None:
        """Let go of what the optimizer holds outside of memory."""
        self._optimizer.states.close()

    def _forward_only(self, work: Sequence[_Work]) -> list[Tensor]:
        with torch.no_grad(), _off(self._dropouts):
            found = self._run(work, _logprobs_only, forward_only=True)
        return self._share(found, [w.micro_batch for w in work])

    def _run(self, work: Sequence[_Work], loss: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Every micro-batch through Megatron's schedule; what `loss` found, on the last pipeline stage alone."""
        run = get_forward_backward_func(self._model.groups.pp.size(), None)
        return run(
            forward_step_func=partial(self._forward_step, loss=loss),
            data_iterator=iter(work),
            model=[self._model.module],
            num_microbatches=len(work),
            seq_length=max(len(w.micro_batch.tokens_T) for w in work),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward_step(self, work: Iterator[_Work], module: Any, loss: Callable[..., Any]) -> tuple[Tensor, Any]:
        item = next(work)
        self.num_passes += 1
        tokens_1T, packed = self._padded(item.micro_batch, item.counter)
        hidden = module(input_ids=tokens_1T, position_ids=None, attention_mask=None, packed_seq_params=packed)
        return hidden, partial(loss, self, item)

    def _padded(self, micro_batch: MicroBatch, counter: RouteCounter | None = None) -> tuple[Tensor, PackedSequences]:
        """Sequence parallelism splits the rows evenly: a last sequence of padding fills them up, outside all losses."""
        tokens = torch.from_numpy(micro_batch.tokens_T)
        lengths, tp = micro_batch.lengths, self._model.groups.tp
        if missing := self._num_missing(micro_batch):
            tokens, lengths = torch.cat((tokens, tokens.new_zeros(missing))), (*lengths, missing)
        packed = PackedSequences.of(lengths, self._device)
        num_rows = len(tokens) // tp.size()
        rows = slice(tp.rank() * num_rows, (tp.rank() + 1) * num_rows)
        packed.routes = Routes.of(micro_batch, rows, self._device, counter)
        return tokens[None].to(self._device), packed

    def _num_missing(self, micro_batch: MicroBatch) -> int:
        return -len(micro_batch.tokens_T) % self._model.groups.tp.size()

    def token_logprobs(self, hidden: Tensor, micro_batch: MicroBatch, head: Head) -> tuple[Tensor, Tensor]:
        """hidden [T or T / tp, 1, X] -> log-probability and entropy at the loss tokens, both float32 [L]."""
        tp = self._model.groups.tp
        if self._model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        elif tp.size() > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
        rows = torch.from_numpy(micro_batch.rows_L).to(self._device)
        targets = torch.from_numpy(micro_batch.targets_L).to(self._device)
        module = self._model.module
        weight = (
            module.shared_embedding_or_output_weight()
            if module.share_embeddings_and_output_weights
            else module.output_layer.weight
        )
        return logprobs_and_entropy(hidden[:, 0].index_select(0, rows), weight, targets, head)

    def _from_last_stage(self, values: Tensor) -> Tensor:
        """The last pipeline stage's values, on every stage."""
        pp = self._model.groups.pp
        if pp.size() > 1:
            values = values.to(self._device)
            dist.broadcast(values, group=pp, group_src=pp.size() - 1)
        return values

    def _share(self, found: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        sizes = [len(m.targets_L) for m in micro_batches]
        whole = torch.cat(list(found)) if found else torch.empty(sum(sizes), device=self._device)
        return list(self._from_last_stage(whole).split(sizes))


@contextmanager
def _off(dropouts: Sequence[nn.Dropout]) -> Iterator[None]:
    """What a policy says, it says with all of its adapters' inputs."""
    for dropout in dropouts:
        dropout.eval()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.train()


def _logprobs_only(policy: MegatronPolicy, work: _Work, hidden: Tensor, non_loss_data: bool) -> Tensor:
    logprobs_L, _ = policy.token_logprobs(hidden, work.micro_batch, work.head)
    return logprobs_L


def _loss(
    policy: MegatronPolicy, work: _Work, hidden: Tensor, *, policy_loss: PolicyLoss
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """In the form of Megatron's loss functions: loss, token count (unused: already divided), what to keep."""
    logprobs_L, entropy_L = policy.token_logprobs(hidden, work.micro_batch, work.head)
    columns = (logprobs_L, entropy_L, work.old_logprobs_L, work.ref_logprobs_L)
    loss, sums = weighted_loss(policy_loss, work.micro_batch, *columns)
    return loss, torch.zeros((), dtype=torch.int, device=hidden.device), (logprobs_L.detach(), sums)
