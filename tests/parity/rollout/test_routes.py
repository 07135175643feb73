"""The experts that an engine says it chose are transformers' own, however the forwards were cut, cached or repeated."""

import asyncio

import numpy as np
import pytest

from beamline.models import tiny
from rollout_messages import prompt_group
from tiny_engines import ENGINE, assert_same, routes_of

SMALL_CACHE_MIB = 2

pytestmark = pytest.mark.asyncio(loop_scope="session")


def reference_routes(model, sequence: int) -> np.ndarray:
    return np.sort(model.reference["routed_experts"][sequence], axis=-1)


async def test_routes_equal_transformers_in_chunked_prefill_and_out_of_the_prefix_cache(engine, model) -> None:
    """Prompts of many lengths at once, twice: in chunks, mixed with decoding, then with most of each in the cache."""
    for seeds in ([1, 2], [3]):
        cuts = [(index, length) for index in range(2) for length in (1, 2, 31, 32, 33, 64, 95, 96)]
        groups = [
            prompt_group(model.reference["tokens"][index][:length].tolist(), seeds=seeds, max_tokens=1)
            for index, length in cuts
        ]
        sampled = await asyncio.gather(*(engine.generate(group) for group in groups))
        for completions, (index, length) in zip(sampled, cuts, strict=True):
            for completion in completions:
                assert np.array_equal(routes_of(completion), reference_routes(model, index)[:length])


async def test_decoding_routes_as_reading_the_whole_text_does(engine, model) -> None:
    prompt = model.reference["tokens"][0][:20].tolist()
    for completion in await engine.generate(prompt_group(prompt, seeds=[1, 2, 3], max_tokens=100)):
        assert len(routes_of(completion)) == len(prompt) + len(completion.tokens) - 1
        (read,) = await engine.generate(prompt_group(prompt + completion.tokens[:-1], seeds=[1], max_tokens=1))
        assert np.array_equal(routes_of(completion), routes_of(read))


async def test_routes_survive_a_cache_too_small_for_its_requests_without_a_prefix_cache(engine, model, start) -> None:
    group = prompt_group(model.reference["tokens"][1][:40].tolist(), seeds=list(range(8)), max_tokens=300)
    expected = await engine.generate(group)
    async with start(model.path, kv_cache_mib=SMALL_CACHE_MIB, prefix_caching=False) as small:
        completions = await small.generate(group)
    # Every prompt fits at the start, their responses do not: requests are put back and computed again.
    blocks = [-(-(40 + len(completion.tokens)) // ENGINE.block_size) for completion in completions]
    assert sum(blocks) > num_small_blocks(model) > 2 * len(blocks)
    for mine, theirs in zip(completions, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert np.abs(np.array(mine.logprobs) - theirs.logprobs).max() < 1e-4
        assert np.array_equal(routes_of(mine), routes_of(theirs))


async def test_in_bfloat16_routes_and_logprobs_stay_near_those_of_float32(model, start) -> None:
    """Near, not equal: choices between experts of like scores flip, as they do between any two implementations."""
    tokens = [sequence.tolist() for sequence in model.reference["tokens"]]
    async with start(model.path, dtype="bfloat16") as rounded:
        scored = np.array([await rounded.score(sequence) for sequence in tokens])
        groups = [prompt_group(sequence, seeds=[1], max_tokens=1) for sequence in tokens]
        sampled = await asyncio.gather(*map(rounded.generate, groups))
    assert 0 < np.abs(scored - model.reference["logprobs"]).mean() < 0.1
    same_RL = np.concatenate(
        [(routes_of(one) == reference_routes(model, index)).all(-1) for index, (one,) in enumerate(sampled)]
    )
    assert (same_RL.mean(0) > 0.86).all()


async def test_dropped_requests_leave_nothing_that_later_ones_could_inherit(engine, model) -> None:
    prompt = model.reference["tokens"][0][:70].tolist()
    expected = await engine.generate(prompt_group(prompt, seeds=[1, 2], max_tokens=20))
    dropped = asyncio.create_task(engine.generate(prompt_group(prompt[:50], seeds=list(range(8)), max_tokens=300)))
    await engine.generate(prompt_group(prompt[:5], seeds=[1], max_tokens=8))
    assert dropped.cancel()
    again = await engine.generate(prompt_group(prompt, seeds=[1, 2], max_tokens=20))
    assert_same(again, expected)


def num_small_blocks(model) -> int:
    """Blocks that hold keys and values of every layer in fp32."""
    spec = tiny.SPECS[model.name]
    token_bytes = 2 * 4 * spec.num_layers * spec.num_key_value_heads * spec.head_dim
    return (SMALL_CACHE_MIB << 20) // (token_bytes * ENGINE.block_size)
