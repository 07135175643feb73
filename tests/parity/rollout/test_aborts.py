"""Aborted samples keep every token that they have, each with the log-probability, version and routes of its forward."""

import asyncio

import pytest

from beamline.protocol.messages import FinishReason
from rollout_messages import prompt_group
from tiny_engines import ENGINE, assert_prefix, assert_same

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_what_an_aborted_sample_keeps_is_what_it_would_have_been(engine, model) -> None:
    prompt = model.reference["tokens"][1][:40].tolist()
    group = prompt_group(prompt, seeds=list(range(8)), max_tokens=300)
    whole, stop = await engine.generate(group), asyncio.Event()
    sampling = asyncio.create_task(engine.generate(group, stop))
    await engine.generate(prompt_group(prompt[:5], seeds=[1], max_tokens=20))
    stop.set()
    async with asyncio.timeout(10):
        aborted = await sampling
    for mine, theirs in zip(aborted, whole, strict=True):
        assert mine.finish_reason is FinishReason.ABORT and 0 < len(mine.tokens) < len(theirs.tokens)
        assert_prefix(mine, theirs, len(prompt))
    for again, theirs in zip(await engine.generate(group), whole, strict=True):
        assert again.finish_reason is theirs.finish_reason
        assert_prefix(again, theirs, len(prompt))


async def test_samples_that_ended_and_those_that_never_began_come_back_beside_the_aborted(engine, model) -> None:
    """More samples than the engine runs at a time, the last of which wait until it is too late."""
    prompt = model.reference["tokens"][0][:30].tolist()
    first = prompt_group(prompt, seeds=[1, 2], max_tokens=4)
    expected = await engine.generate(first)
    long = prompt_group(prompt, seeds=list(range(ENGINE.max_num_seqs + 4)), max_tokens=400)
    stop = asyncio.Event()
    ended = asyncio.create_task(engine.generate(first, stop))
    sampling = asyncio.create_task(engine.generate(long, stop))
    assert_same(await ended, expected)
    await engine.release_memory()
    stop.set()
    async with asyncio.timeout(10):
        completions = await sampling
    await engine.restore_memory()
    assert all(completion.finish_reason is FinishReason.ABORT for completion in completions)
    untouched = [completion for completion in completions if not completion.tokens]
    assert 4 <= len(untouched) < len(completions), "the engine had room for all of them"
    for completion in untouched:
        assert (completion.logprobs, completion.version_spans, completion.text) == ([], [], "")
        assert completion.routed_experts is None
    begun = {seed: completion for seed, completion in enumerate(completions) if completion.tokens}
    longest = max(len(completion.tokens) for completion in begun.values())
    whole = await engine.generate(prompt_group(prompt, seeds=list(begun), max_tokens=longest + 1))
    for mine, theirs in zip(begun.values(), whole, strict=True):
        assert_prefix(mine, theirs, len(prompt))
