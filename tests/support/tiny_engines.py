"""What the tests of real engines on tiny models share."""

import msgspec
import numpy as np

from beamline.protocol.config import EngineSection
from beamline.rollout.engine import Completion, Engine, Pause
from beamline.weights.manifest import WeightManifest

MAX_MODEL_TOKENS = 512
# Prompts of 96 tokens arrive in chunks of at most 64, mixed with decoding, across cached blocks of 32.
ENGINE = EngineSection(kv_cache_mib=64, max_num_seqs=32, max_num_batched_tokens=64, block_size=32)
ROUNDING = 1e-5
"""Of log-probabilities in float32: which requests an engine computes together changes their last bits."""


async def load(engine: Engine, manifest: WeightManifest, pause: Pause = "keep") -> int:
    """Stage a policy and activate it; returns the bytes that were fetched."""
    num_bytes = await engine.stage_weights(manifest)
    await engine.activate_weights(pause)
    return num_bytes


def routes_of(completion: Completion) -> np.ndarray:
    """Expert ids [rows, layers, top_k] of a completion, in rising order: which they are is what counts."""
    assert completion.routed_experts is not None
    return np.sort(completion.routed_experts, axis=-1)


def assert_same(mine: list[Completion], theirs: list[Completion]) -> None:
    """Equal in everything but what rounding makes of log-probabilities."""
    for one, other in zip(mine, theirs, strict=True):
        first, second = (msgspec.structs.replace(each, routed_experts=None, logprobs=[]) for each in (one, other))
        assert first == second
        assert np.abs(np.array(one.logprobs) - other.logprobs).max() < ROUNDING
        assert np.array_equal(routes_of(one), routes_of(other))


def assert_prefix(part: Completion, whole: Completion, num_prompt_tokens: int) -> None:
    """What was sampled of an aborted sample, and noted of it, begins the whole one."""
    num_tokens = len(part.tokens)
    assert part.tokens == whole.tokens[:num_tokens]
    assert np.abs(np.array(part.logprobs) - whole.logprobs[:num_tokens]).max() < 1e-4
    (span,) = part.version_spans
    assert (span.policy_version, span.start, span.end) == (whole.version_spans[0].policy_version, 0, num_tokens)
    num_rows = num_prompt_tokens + num_tokens - 1
    assert np.array_equal(routes_of(part), routes_of(whole)[:num_rows])
