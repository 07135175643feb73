"""A mend for vLLM 0.32 on a CPU: a seeded request whose prompt is prefilled in chunks ends the whole engine.

vLLM samples after every chunk, throws away what it drew before the prompt was complete, and then steps the request's
generator back. CPU generators cannot be stepped back and raise. These can: they start again from their seed and
repeat one draw for each token that the request has kept, so that a seed gives the same tokens however the prompt was
cut, and after a preemption too.
"""

from functools import wraps
from typing import Any

import torch

_DRAW_BOUND = 2**31
"""vLLM's CPU sampler draws one integer below it for each token."""


class SeededGenerator(torch.Generator):
    """A CPU generator that knows how many tokens its request has kept."""

    def __new__(cls, request: Any, seed: int) -> "SeededGenerator":
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]

    def __init__(self, request: Any, seed: int) -> None:
        self._request = request
        self.manual_seed(seed)

    def get_offset(self) -> int:
        """vLLM only reads it to subtract one draw."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Undo the draws of a token that was thrown away."""
        self.manual_seed(self.initial_seed())
        if num_tokens := len(self._request.output_token_ids):
            torch.randint(0, _DRAW_BOUND, (num_tokens,), generator=self)


def install() -> None:
    """Give every seeded CPU request such a generator; calling it again does nothing."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    post_init = CachedRequestState.__post_init__
    if hasattr(post_init, "__wrapped__"):
        return

    @wraps(post_init)
    def seed_request(self: Any) -> None:
        post_init(self)
        if self.generator is not None and self.generator.device.type == "cpu":
            self.generator = SeededGenerator(self, self.generator.initial_seed())

    CachedRequestState.__post_init__ = seed_request
