"""An engine without a model: the promises of `engine.Engine`, kept by arithmetic.

Tokens depend on prompt, seed and policy version alone, and `token_logprob` is the policy of version v, so that a test
can check any log-probability, and a fake trainer can make the canary.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence

import numpy as np

from beamline.models.routing import RoutingShape
from beamline.protocol.blobs import VersionSpan
from beamline.protocol.errors import Rejected, WeightError
from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine import Completion, MemoryReport
from beamline.weights.manifest import WeightManifest

END_TOKEN = 2
FIRST_WORD = 3
VOCABULARY_SIZE = 512
WEIGHT_BYTES, CACHE_BYTES = 1 << 20, 4 << 20


def token_logprob(token: int, policy_version: int) -> float:
    """Log-probability of a token, whatever precedes it, under the policy of that version."""
    return -1.0 - (token * 31 + policy_version * 17) % 97 / 97


class FakeEngine:
    """Samples at once, unless told to wait.

    Args:
        max_model_tokens: prompt and response together.
        damaged: policy versions whose weights are refused.
        drifted: policy versions that load but sample from another policy, as corrupted weights would.
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
        wait: Callable[[], asyncio.Future[None]] | None = None,
        respond: Callable[[PromptGroup, int], str] = lambda _group, seed: f"Answer: {seed}",
        shape: RoutingShape | None = None,
        spoil: Callable[[np.ndarray], np.ndarray | None] = lambda ids_RLK: ids_RLK,
    ) -> None:
        self._max_model_tokens = max_model_tokens
        self.damaged = damaged
        self._drifted = drifted
        self._wait = wait
        self._respond = respond
        self._shape = shape
        self.spoil = spoil
        self._serving = asyncio.Event()
        self._serving.set()
        self.policy_version = 0
        self.num_forgotten = 0
        """How often cached prefixes were dropped."""
        self.closed = False

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        num_tokens = len(group.prompt_tokens) + group.sampling.max_tokens
        if num_tokens > self._max_model_tokens:
            raise Rejected("prompt_too_long", f"{num_tokens} tokens do not fit {self._max_model_tokens}")
        return list(await asyncio.gather(*(self._sample(group, seed, stop) for seed in group.seeds)))

    async def load_weights(self, manifest: WeightManifest, policy_version: int) -> None:
        if policy_version in self.damaged:
            raise WeightError(f"policy {manifest.policy_version}: its weights are damaged")
        self.policy_version = policy_version

    async def score(self, tokens: Sequence[int]) -> list[float]:
        drift = 0.5 if self.policy_version in self._drifted else 0.0
        return [token_logprob(token, self.policy_version) + drift for token in tokens[1:]]

    async def forget_prefixes(self) -> None:
        self.num_forgotten += 1

    async def release_memory(self) -> MemoryReport:
        before = WEIGHT_BYTES + (CACHE_BYTES if self._serving.is_set() else 0)
        self._serving.clear()
        return MemoryReport(before_bytes=before, after_bytes=WEIGHT_BYTES)

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
        while len(tokens) < length and await self._goes_on(stop):
            tokens.append(rng.randrange(FIRST_WORD, VOCABULARY_SIZE))
            versions.append(self.policy_version)
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

    async def _goes_on(self, stop: asyncio.Event | None) -> bool:
        """Wait for the next token's turn; False where the sample is aborted instead."""
        stop = stop or asyncio.Event()
        if self._wait is None and self._serving.is_set():
            return not stop.is_set()
        turn, stopped = asyncio.create_task(self._turn()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({turn, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.cancel()
            stopped.cancel()
        return not stopped.done()

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
