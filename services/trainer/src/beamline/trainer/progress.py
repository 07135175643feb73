"""How far the step under way has come, for whoever watches: written by the policy's thread, read by the event loop."""

from collections.abc import Iterator
from contextlib import contextmanager

from beamline.trainer.batch import Batch
from beamline.trainer.policy import Policy
from beamline.trainer.train_step import StepConfig


class Progress:
    """Counts the forward passes of a rank's policy against what the step takes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._begin = self._num_passes = self._num_tokens = 0

    @contextmanager
    def of(self, batch: Batch, config: StepConfig) -> Iterator[None]:
        """The block trains the batch."""
        lengths = [[len(t.tokens) for t in mini_batch.trajectories] for mini_batch in batch.mini_batches]
        self._begin, self._num_tokens = self._policy.num_passes, sum(map(sum, lengths))
        self._num_passes = num_passes(batch, config)
        try:
            yield
        finally:
            self._num_passes = self._num_tokens = 0

    def gauges(self) -> dict[str, float]:
        """`progress/*` of the trainer; all 0 between two steps."""
        done = self._policy.num_passes - self._begin if self._num_passes else 0
        return {
            "progress/micro_batches_done": float(done),
            "progress/micro_batches": float(self._num_passes),
            "progress/train_tokens": float(self._num_tokens),
        }


def num_passes(batch: Batch, config: StepConfig) -> int:
    """Forward passes that `train_step` makes of micro-batches: read before the step where needed, then trained."""
    counts = [len(mini_batch.micro_batches(config.max_tokens)) for mini_batch in batch.mini_batches]
    num_old = sum(counts if config.reads_first else counts[1:])
    num_reference = sum(counts) if config.penalty is not None or config.loss.kl is not None else 0
    return num_old + num_reference + sum(counts)
