"""A trajectory of several turns, as tokens: what the policy sampled is kept as sampled, never written and read again.

prompt | turn | observation | turn | observation | turn

Only observations are tokenised. A turn's routed experts come with every token before it; a row once had stays as it
was, and an observation's rows are those of the forward that read it for the next turn.
"""

from typing import TYPE_CHECKING

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.messages import FinishReason
from beamline.rollout.engine import Completion

if TYPE_CHECKING:
    import numpy as np


class Transcript:
    """A trajectory as it grows.

    Args:
        prompt: its tokens.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._prompt = prompt
        self._tokens: list[int] = []
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._text = ""
        self._trace: np.ndarray | None = None
        self._unread: list[int] = []
        self._unread_text = ""
        self.num_turns = 0

    @property
    def tokens(self) -> list[int]:
        """What the next turn follows: the prompt and all that came after it."""
        return [*self._prompt, *self._tokens, *self._unread]

    @property
    def num_response_tokens(self) -> int:
        """Observations among them."""
        return len(self._tokens) + len(self._unread)

    def observe(self, tokens: list[int], text: str) -> None:
        """What the policy reads before its next turn. Without a turn after it, it is no part of the trajectory."""
        self._unread, self._unread_text = tokens, text

    def add(self, turn: Completion) -> None:
        """A turn, sampled from `tokens`. One that was aborted before its first token leaves nothing."""
        if not turn.tokens:
            return
        start = self.num_response_tokens
        self._tokens += [*self._unread, *turn.tokens]
        self._loss_mask += [False] * len(self._unread) + [True] * len(turn.tokens)
        self._logprobs += [0.0] * len(self._unread) + turn.logprobs
        self._spans += [
            VersionSpan(span.policy_version, start + span.start, start + span.end) for span in turn.version_spans
        ]
        self._text += self._unread_text + turn.text
        self._trace = turn.routed_experts if self.num_turns == 0 else _extended(self._trace, turn.routed_experts)
        self._unread, self._unread_text = [], ""
        self.num_turns += 1

    def completion(self, finish_reason: FinishReason, environment_reward: float) -> Completion:
        """The trajectory as it stands."""
        return Completion(
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish_reason=finish_reason,
            text=self._text,
            version_spans=self._spans,
            routed_experts=self._trace,
            loss_mask=self._loss_mask,
            environment_reward=environment_reward,
        )


def _extended(before: "np.ndarray | None", after: "np.ndarray | None") -> "np.ndarray | None":
    """The rows so far, and of a longer trace those behind them."""
    import numpy as np  # the entry point must not wait for it

    return None if before is None or after is None else np.concatenate((before, after[len(before) :]))
