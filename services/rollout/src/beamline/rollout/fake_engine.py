"""An engine without a model: the promises of `engine.Engine`, kept by arithmetic.

Tokens depend on prompt, seed and policy version alone, and `token_logprob` is the policy of version v, so that a test
can check any log-probability, and a fake trainer can make the canary.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
import numpy as np

from beamline.models.routing import RoutingShape
from beamline.protocol.blobs import VersionSpan
from beamline.protocol.errors import Rejected, WeightError
from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine import Completion, MemoryReport, Pause, Scored
from beamline.rollout.engine_meter import EngineMeter
from beamline.weights.manifest import WeightManifest

END_TOKEN = 2
FIRST_WORD = 3
VOCABULARY_SIZE = 512
WEIGHT_BYTES, CACHE_BYTES = 1 << 20, 4 << 20


type Delay = Callable[[str, int], Awaitable[None]]
"""Awaited with "stage" or "activate" and a policy version before that is done."""


async def at_once(_what: str, _version: int) -> None:
    """No delay."""


def token_logprob(token: int, policy_version: int) -> float:
    """Log-probability of a token, whatever precedes it, under the policy of that version."""
    return -1.0 - (token * 31 + policy_version * 17) % 97 / 97


class _Policy(msgspec.Struct):
    """What samples read: those that were under way when another was served beside theirs read theirs on."""

    version: int


class FakeEngine:
    """Samples at once, unless told to wait.

    Args:
        max_model_tokens: prompt and response together.
        damaged: policy versions whose weights are refused when they are staged.
        drifted: policy versions that load but sample from another policy, as corrupted weights would.
        delay: how long staging and activating a policy take.
        kept_bytes: what it does not give back of what it has to.
        wait: awaited before each token; None samples a response in one go.
        respond: text of a response, by prompt and seed. One that a stop text cuts short has a token a character.
        shape: of the routes that it says it took; None records none.
        spoil: makes of a trace's ids [rows, layers, top_k] what is handed out instead; None for no trace.
    """

    def __init__(
        self,
        *,
        max_model_tokens: int = 4096,
        damaged: Collection[int] = (),
        drifted: Collection[int] = (),
        delay: Delay = at_once,
        kept_bytes: int = 0,
        wait: Callable[[], asyncio.Future[None]] | None = None,
        respond: Callable[[PromptGroup, int], str] = lambda _group, seed: f"Answer: {seed}",
        shape: RoutingShape | None = None,
        spoil: Callable[[np.ndarray], np.ndarray | None] = lambda ids_RLK: ids_RLK,
    ) -> None:
        self.meter = EngineMeter()
        self._max_model_tokens = max_model_tokens
        self.damaged = damaged
        self.drifted = drifted
        self.delay = delay
        self._kept_bytes = kept_bytes
        self._wait = wait
        self._respond = respond
        self._shape = shape
        self.spoil = spoil
        self._serving = asyncio.Event()
        self._serving.set()
        self._admits = asyncio.Event()
        self._admits.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_under_way = 0
        self._cut_off = asyncio.Event()
        """Set for the samples that are under way when a policy is activated with "abort"."""
        self._policy = _Policy(0)
        self.staged: int | None = None
        self.num_staged = 0
        """How often a policy was staged."""
        self.num_forgotten = 0
        """How often cached prefixes were dropped."""
        self.closed = False

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        num_tokens = len(group.prompt_tokens) + group.sampling.max_tokens
        if num_tokens > self._max_model_tokens:
            raise Rejected("prompt_too_long", f"{num_tokens} tokens do not fit {self._max_model_tokens}")
        await self._admits.wait()
        self._num_under_way += 1
        self.meter.num_running += len(group.seeds)
        self._idle.clear()
        try:
            return list(await asyncio.gather(*(self._sample(group, seed, stop) for seed in group.seeds)))
        finally:
            self._num_under_way -= 1
            self.meter.num_running -= len(group.seeds)
            if not self._num_under_way:
                self._idle.set()

    async def stage_weights(self, manifest: WeightManifest, slot_wait_s: float = 0.0) -> int:
        version, self.staged = manifest.policy_version, None
        self.num_staged += 1
        await self.delay("stage", version)
        if version in self.damaged:
            raise WeightError(f"policy {version}: its weights are damaged")
        self.staged = version
        return WEIGHT_BYTES

    async def activate_weights(self, pause: Pause = "keep") -> None:
        if self.staged is None:
            raise WeightError("no policy is staged")
        try:
            if pause == "drain" and self._serving.is_set():
                self._admits.clear()
                await self._idle.wait()
            await self.delay("activate", self.staged)
            if pause == "abort":
                self._cut_off.set()
                self._cut_off = asyncio.Event()
            if pause == "overlap":
                self._policy = _Policy(self.staged)
            self._policy.version, self.staged = self.staged, None
        finally:
            self._admits.set()

    async def drop_staged(self) -> None:
        self.staged = None

    @property
    def policy_version(self) -> int:
        """That requests which come are sampled from."""
        return self._policy.version

    async def score(self, tokens: Sequence[int], policy: Scored = "served") -> list[float]:
        version = {"served": self.policy_version, "staged": self.staged, "base": 0}[policy]
        assert version is not None, "no policy is staged"
        drift = 0.5 if version in self.drifted else 0.0
        return [token_logprob(token, version) + drift for token in tokens[1:]]

    async def forget_prefixes(self) -> None:
        self.num_forgotten += 1

    async def release_memory(self) -> MemoryReport:
        before = WEIGHT_BYTES + (CACHE_BYTES if self._serving.is_set() else 0)
        self._serving.clear()
        after = WEIGHT_BYTES + self._kept_bytes
        return MemoryReport(before_bytes=before, after_bytes=after, kept_bytes=self._kept_bytes)

    async def restore_memory(self) -> MemoryReport:
        self._serving.set()
        return MemoryReport(before_bytes=WEIGHT_BYTES, after_bytes=WEIGHT_BYTES + CACHE_BYTES)

    async def until_broken(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True

    async def _sample(self, group: PromptGroup, seed: int, stop: asyncio.Event | None) -> Completion:
        rng = random.Random(f"{group.prompt_tokens}:{seed}")
        length = rng.randint(1, group.sampling.max_tokens)
        text, cut = _up_to_stop(self._respond(group, seed), group.sampling.stop)
        if cut:
            length = min(len(text), group.sampling.max_tokens)
        tokens: list[int] = []
        versions: list[int] = []
        cut_off, policy = self._cut_off, self._policy
        while len(tokens) < length and await self._goes_on(stop or asyncio.Event(), cut_off):
            tokens.append(rng.randrange(FIRST_WORD, VOCABULARY_SIZE))
            versions.append(policy.version)
        self.meter.num_prompt_tokens += len(group.prompt_tokens)
        self.meter.num_generated_tokens += len(tokens)
        reason = FinishReason.LENGTH if length == group.sampling.max_tokens else FinishReason.STOP
        if len(tokens) < length:
            reason = FinishReason.ABORT
        elif reason is FinishReason.STOP and not cut:
            tokens[-1] = END_TOKEN
        return Completion(
            tokens=tokens,
            logprobs=[token_logprob(token, version) for token, version in zip(tokens, versions, strict=True)],
            finish_reason=reason,
            text="" if reason is FinishReason.ABORT else text,
            version_spans=_spans(versions),
            routed_experts=self._trace([*group.prompt_tokens, *tokens[:-1]]) if tokens else None,
        )

    async def _goes_on(self, stop: asyncio.Event, cut_off: asyncio.Event) -> bool:
        """Wait for the next token's turn; False where the sample is aborted instead."""
        if self._wait is None and self._serving.is_set():
            return not stop.is_set() and not cut_off.is_set()
        turn = asyncio.create_task(self._turn())
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(cut_off.wait())]
        try:
            await asyncio.wait({turn, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (turn, *ends):
                task.cancel()
        return not stop.is_set() and not cut_off.is_set()

    async def _turn(self) -> None:
        if self._wait is not None:
            await self._wait()
        await self._serving.wait()

    def _trace(self, tokens: Sequence[int]) -> np.ndarray | None:
        return None if self._shape is None else self.spoil(routes(tokens, self._shape))


def routes(tokens: Sequence[int], shape: RoutingShape) -> np.ndarray:
    """Experts of these tokens [rows, layers, top_k], in every sparse layer others: the ones from token + layer on."""
    first_RS = np.array(tokens)[:, None] + np.array(shape.sparse_layers)
    ids_RLK = np.zeros((len(tokens), shape.num_layers, shape.top_k), shape.dtype)
    ids_RLK[:, shape.sparse_layers] = (first_RS[..., None] + np.arange(shape.top_k)) % shape.num_experts
    return ids_RLK


def _up_to_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text up to the end of the first stop text in it, and whether there is one."""
    ends = [text.index(one) + len(one) for one in stop if one in text]
    return (text[: min(ends)], True) if ends else (text, False)


def _spans(versions: Sequence[int]) -> list[VersionSpan]:
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts, len(versions)][1:]
    return [VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True)]
