"""A sample in the making: one request, or several where it was cut off and taken up again under another policy.

Each further request has the prompt and what was sampled so far as its prompt. What was sampled is never sampled anew:
its tokens, log-probabilities, versions and routed experts are those of the request that had them.
"""

import hashlib

import msgspec
import numpy as np

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.messages import FinishReason, PromptGroup


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one request has sampled."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version_spans: list[VersionSpan]
    routed_experts: np.ndarray | None
    """[its prompt + tokens - 1, layers, experts a token]; None where there are no tokens, or none are recorded."""


class Sample:
    """One sample of a group.

    Args:
        group: it belongs to.
        seed: of the sample.
    """

    def __init__(self, group: PromptGroup, seed: int) -> None:
        self.group = group
        self._seed = seed
        self._num_parts = 0
        self.request_id = ""
        """Of the request that is under way."""
        self.continues = False
        """Whether it is taken up again if its request is aborted."""
        self.is_stopped = False
        """Whether it is to end as it is."""
        self.finish_reason: FinishReason | None = None
        """Of the last part; None before there is one, and where it is to be taken up again."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.version_spans: list[VersionSpan] = []
        self.routed_experts: np.ndarray | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no further request is to be made."""
        return self.is_stopped or self.finish_reason is not None

    @property
    def prompt(self) -> list[int]:
        """Of the next request."""
        return [*self.group.prompt_tokens, *self.tokens]

    @property
    def max_tokens(self) -> int:
        """Of the next request."""
        return self.group.sampling.max_tokens - len(self.tokens)

    @property
    def seed(self) -> int:
        """Of the next request: a further one must not repeat the draws of the first."""
        return part_seed(self._seed, self._num_parts)

    def stop(self) -> None:
        """Let it end with what it has."""
        self.is_stopped = True
        self.continues = False

    def add(self, part: Part) -> None:
        """What the request under way has sampled, which has ended."""
        self.request_id = ""
        goes_on = part.finish_reason is FinishReason.ABORT and self.continues
        self.continues = False
        self.finish_reason = None if goes_on else part.finish_reason
        if not part.tokens:
            return
        start = len(self.tokens)
        self._num_parts += 1
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        for span in part.version_spans:
            self._add_span(VersionSpan(span.policy_version, start + span.start, start + span.end))
        before, after = self.routed_experts, part.routed_experts
        if before is not None and after is not None:
            after = np.concatenate((before, after[len(before) :]))
        self.routed_experts = after

    def _add_span(self, span: VersionSpan) -> None:
        last = self.version_spans[-1] if self.version_spans else None
        if last and last.policy_version == span.policy_version:
            self.version_spans[-1] = VersionSpan(last.policy_version, last.start, span.end)
        else:
            self.version_spans.append(span)


def part_seed(seed: int, part: int) -> int:
    """The seed of a sample's part, in [0, 2^31); the first part has the sample's own."""
    if part == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/part/{part}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
