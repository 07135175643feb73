"""A rank that notes when tokens were sampled."""

import time
from typing import Any

from beamline.rollout.engine_worker import EngineWorker


class TimedWorker(EngineWorker):
    """Has the times, in seconds of the host's monotonic clock, at which steps ended that sampled any token."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._sampled_at: list[float] = []

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if any(output.sampled_token_ids):
            self._sampled_at.append(time.monotonic())
        return output

    def sampled_at(self) -> list[float]:
        """And forgets them."""
        times, self._sampled_at = self._sampled_at, []
        return times
