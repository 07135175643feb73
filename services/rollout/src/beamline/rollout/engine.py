"""The inference engine as the rollout worker sees it.

`vllm_engine.VllmEngine` is the real one; `fake_engine.FakeEngine` keeps the same promises without a model, for the
in-memory ring and the worker's unit tests. Nothing here imports an engine.
"""

import asyncio
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine_meter import EngineMeter

if TYPE_CHECKING:
    import numpy as np

    from beamline.weights.manifest import WeightManifest


type Pause = Literal["keep", "drain", "abort", "continue", "overlap"]
type Scored = Literal["served", "staged", "base"]
"""With adapters: those that are served, those that are staged, or none."""


class EngineError(BeamlineError):
    """The engine broke: nothing that it was doing can be trusted, and its process must end."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled response."""

    tokens: list[int]
    """The end token included. None at all where the sample was aborted before its first."""
    logprobs: list[float]
    """log softmax(logits / temperature) of each sampled token; temperature 1 where sampling was greedy. 0 of others."""
    finish_reason: FinishReason
    text: str
    version_spans: list[VersionSpan]
    """Of the sampled tokens, in order."""
    routed_experts: "np.ndarray | None" = None
    """Expert ids [prompt + response - 1, layers, experts a token], a trace as `models.routing` describes it. None where
    the engine was not told to record them, and where no token was sampled."""
    loss_mask: list[bool] | None = None
    """Which tokens were sampled: all of them where it is None, not those that an environment wrote."""
    environment_reward: float | None = None
    """None without an environment."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Resident bytes of the engine's processes, measured before and after."""

    before_bytes: int
    after_bytes: int
    kept_bytes: int = 0
    """Of the memory that was to be released, what is still resident: counted page by page."""

    @property
    def freed_bytes(self) -> int:
        return max(0, self.before_bytes - self.after_bytes)


class Sampler(Protocol):
    """What makes trajectories of a group: an engine by itself, or with an environment between its turns."""

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        """One trajectory a seed, in order; when `stop` is set, those that still run come back as they are."""
        ...


class Engine(Protocol):
    """Samples from one policy at a time. Calls may overlap, those that change the policy among them."""

    meter: EngineMeter
    """What it does, kept up to date."""

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        """Sample the prompt once a seed, in the order of the seeds, each up to an end token, a stop text or the limit.

        The same seed under the same policy and sampling gives the same tokens. Cancelling the call drops its samples.

        Args:
            stop: when it is set, the samples that still run are aborted: each comes back at once, also while memory is
                released, with all tokens that it has and, for every one of them, its log-probability, version and
                routed experts as they were when it was sampled.

        Raises:
            Rejected: kind "prompt_too_long", where prompt and `max_tokens` do not fit the model.
        """
        ...

    async def stage_weights(self, manifest: "WeightManifest", slot_wait_s: float = 0.0) -> int:
        """Fetch and verify another policy beside the one that is served; returns the bytes that all ranks fetched.

        It takes the place of what was staged before. Adapters that a slot still holds, because they were served
        before, are not fetched again.

        Args:
            slot_wait_s: how long to wait for requests to leave a slot for adapters.

        Raises:
            WeightError: weights that are damaged, late or not this model's; or adapters for which no slot is free.
                Nothing is staged then, and the old policy is served on.
        """
        ...

    async def activate_weights(self, pause: Pause = "keep") -> None:
        """Serve the staged policy from here on, and let go of its transport's memory.

        Raises WeightError: nothing is staged, or it could not be loaded; what the engine has then is uncertain.

        Args:
            pause: what becomes of samples under way. "keep": they go on with the new policy, and their spans say so.
                "drain": it is waited for them, but not while memory is released, for then they cannot end. "abort":
                they come back as they are, with finish reason ABORT; "continue": likewise, but each is taken up again,
                as a request that begins with what it had. "overlap", of adapters alone: their requests end with the
                policy that they began with, beside those of the new one, and no token waits.
        """
        ...

    async def drop_staged(self) -> None:
        """Let go of a staged policy that is not to be activated."""
        ...

    async def score(self, tokens: list[int], policy: Scored = "served") -> list[float]:
        """Log-probabilities of tokens 1 to n-1 given what precedes each, at temperature 1, without any cache.

        Works while memory is released: the few blocks that it needs are borrowed and given back.

        Args:
            policy: others than "served" need adapters.
        """
        ...

    async def forget_prefixes(self) -> None:
        """Drop what is cached of prompts: the keys and values, and the routed experts that are kept with them."""
        ...

    async def release_memory(self) -> MemoryReport:
        """Give the key-value cache's memory back to the machine. Samples under way wait, and are recomputed later."""
        ...

    async def restore_memory(self) -> MemoryReport:
        """Serve again after `release_memory`; a repeat does nothing."""
        ...

    async def until_broken(self) -> None:
        """Never returns. Raises EngineError when one of the engine's processes has ended by itself."""
        ...

    async def close(self) -> None:
        """End the engine's processes."""
        ...
