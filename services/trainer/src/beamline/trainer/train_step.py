"""One train step, top to bottom: what is read before it, then one update a mini-batch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from opentelemetry import trace

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import Batch, MicroBatch
from beamline.trainer.peers import ALONE, Peers
from beamline.trainer.penalty import RewardPenalty
from beamline.trainer.policy import NotFinite, Policy
from beamline.trainer.step_stats import StepStats

tracer = trace.get_tracer(__name__)

type Column = Sequence[torch.Tensor]
"""Of one mini-batch: float32 [L] per micro-batch."""


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know."""

    loss: PolicyLoss
    max_tokens: int
    """Of one micro-batch."""
    lr: float
    penalty: RewardPenalty | None = None
    has_dropout: bool = False
    """Then what an update's own forward pass finds is not what the policy says."""

    @property
    def reads_first(self) -> bool:
        """Whether the first mini-batch's old_logprobs need a pass of their own, as those of the others do."""
        return self.penalty is not None or self.has_dropout


def train_step(policy: Policy, batch: Batch, config: StepConfig, peers: Peers = ALONE) -> StepStats:
    """Turn policy `batch.step - 1` into policy `batch.step`.

    Raises NotFinite, naming step and mini-batch, before an update that would spoil the weights.
    """
    stats = StepStats(batch.step, batch.data_sources, config.loss, config.lr)
    plan = [mini_batch.micro_batches(config.max_tokens) for mini_batch in batch.mini_batches]
    old_logprobs = _old_logprobs(policy, plan, config, stats)
    ref_logprobs = _ref_logprobs(policy, plan, config, stats)
    if config.penalty is not None:
        plan, kl = config.penalty.take_off(batch.groups, plan, old_logprobs, ref_logprobs, peers)
        stats.add_penalty(kl)
    for index, (micro_batches, old, ref) in enumerate(zip(plan, old_logprobs, ref_logprobs, strict=True)):
        started = time.perf_counter()
        try:
            with tracer.start_as_current_span("mini_batch", attributes={"beamline.mini_batch": index + 1}):
                result = policy.forward_backward(micro_batches, old, config.loss, ref)
                with tracer.start_as_current_span("optimizer"):
                    grad_norm = policy.optimizer_step(config.lr)
        except NotFinite as error:
            raise NotFinite(
                f"step {batch.step}, mini-batch {index + 1} of {len(plan)}: {error}. The update was not applied; "
                f"lower trainer.optimizer.lr (now {config.lr:g}) or look at the batch's advantages"
            ) from error
        stats.add_update(micro_batches, old or result.logprobs, result, grad_norm)
        stats.add_time("update", started)
    stats.add_routing(policy.take_route_counts())
    return stats


@tracer.start_as_current_span("old_logprobs")
def _old_logprobs(
    policy: Policy, plan: Sequence[Sequence[MicroBatch]], config: StepConfig, stats: StepStats
) -> list[Column | None]:
    """Before the first update. Where they can, the first mini-batch's come of its own forward pass."""
    started = time.perf_counter()
    first = [policy.logprobs(plan[0])] if config.reads_first else [None]
    found = [*first, *(policy.logprobs(micro_batches) for micro_batches in plan[1:])]
    stats.add_time("old_logprobs", started)
    return found


def _ref_logprobs(
    policy: Policy, plan: Sequence[Sequence[MicroBatch]], config: StepConfig, stats: StepStats
) -> list[Column | None]:
    if config.loss.kl is None and config.penalty is None:
        return [None] * len(plan)
    started = time.perf_counter()
    with tracer.start_as_current_span("reference"):
        found: list[Column | None] = [policy.reference_logprobs(micro_batches) for micro_batches in plan]
    stats.add_time("reference", started)
    return found
