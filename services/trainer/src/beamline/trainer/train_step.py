"""One train step, top to bottom: old_logprobs of every mini-batch, then one update a mini-batch."""

import time
from dataclasses import dataclass

from beamline.algorithms.losses import PolicyLoss
from beamline.trainer.batch import Batch
from beamline.trainer.policy import NotFinite, Policy
from beamline.trainer.step_stats import StepStats


@dataclass(frozen=True)
class StepConfig:
    """What a step needs to know."""

    loss: PolicyLoss
    max_tokens: int
    """Of one micro-batch."""
    lr: float


def train_step(policy: Policy, batch: Batch, config: StepConfig) -> StepStats:
    """Turn policy `batch.step - 1` into policy `batch.step`.

    Raises NotFinite, naming step and mini-batch, before an update that would spoil the weights.
    """
    stats = StepStats(batch.step, batch.data_sources, config.loss.off_policy, config.lr)
    started = time.perf_counter()
    plan = [mini_batch.micro_batches(config.max_tokens) for mini_batch in batch.mini_batches]
    # Before the first update. The first mini-batch's come out of its own forward pass.
    later = [policy.logprobs(micro_batches) for micro_batches in plan[1:]]
    stats.add_time("old_logprobs", started)
    for index, old_logprobs in enumerate([None, *later]):
        started = time.perf_counter()
        num_loss_tokens = batch.mini_batches[index].num_loss_tokens
        try:
            result = policy.forward_backward(plan[index], old_logprobs, config.loss, num_loss_tokens)
            grad_norm = policy.optimizer_step(config.lr)
        except NotFinite as error:
            raise NotFinite(
                f"step {batch.step}, mini-batch {index + 1} of {len(plan)}: {error}. The update was not applied; "
                f"lower trainer.optimizer.lr (now {config.lr:g}) or look at the batch's advantages"
            ) from error
        stats.add_update(plan[index], old_logprobs or result.logprobs, result, grad_norm)
        stats.add_time("update", started)
    stats.add_routing(policy.take_route_counts())
    return stats
