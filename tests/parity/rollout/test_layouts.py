"""Two ranks, by tensor or by pipeline, are one engine: log-probabilities, routes, policies and memory are the same."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.messages import FinishReason
from rollout_messages import export, prompt_group
from tiny_engines import assert_prefix, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["tensor_parallel", "pipeline_parallel"])
async def ranks(request: pytest.FixtureRequest, model, start) -> AsyncIterator:
    """An engine of two ranks, with the reference weights as policy 0."""
    async with start(model.path, **{request.param: 2}) as running:
        yield running


async def scores(engine, model) -> np.ndarray:
    return np.array([await engine.score(tokens.tolist()) for tokens in model.reference["tokens"]])


async def test_logprobs_and_routes_equal_transformers(ranks, model) -> None:
    assert np.abs(await scores(ranks, model) - model.reference["logprobs"]).max() < TOLERANCE
    for seeds in ([1, 2], [3]):
        groups = [prompt_group(tokens.tolist(), seeds=seeds, max_tokens=1) for tokens in model.reference["tokens"]]
        for completions, routes in zip(
            await asyncio.gather(*map(ranks.generate, groups)), model.reference["routed_experts"], strict=True
        ):
            for completion in completions:
                assert np.array_equal(routes_of(completion), np.sort(routes, axis=-1))


async def test_samples_equal_those_of_one_rank(ranks, engine, model) -> None:
    group = prompt_group(model.reference["tokens"][0][:70].tolist(), seeds=list(range(6)), max_tokens=60)
    for mine, theirs in zip(await ranks.generate(group), await engine.generate(group), strict=True):
        assert mine.tokens == theirs.tokens and mine.version_spans == [VersionSpan(0, 0, len(mine.tokens))]
        assert np.abs(np.array(mine.logprobs) - theirs.logprobs).max() < TOLERANCE
        assert np.array_equal(routes_of(mine), routes_of(theirs))


async def test_aborted_samples_keep_what_every_rank_noted_of_them(ranks, model) -> None:
    prompt = model.reference["tokens"][0][:70].tolist()
    group = prompt_group(prompt, seeds=list(range(6)), max_tokens=60)
    whole, stop = await ranks.generate(group), asyncio.Event()
    sampling = asyncio.create_task(ranks.generate(group, stop))
    await ranks.generate(prompt_group(prompt[:5], seeds=[1], max_tokens=10))
    stop.set()
    async with asyncio.timeout(10):
        aborted = await sampling
    for mine, theirs in zip(aborted, whole, strict=True):
        assert mine.finish_reason is FinishReason.ABORT and 0 < len(mine.tokens) < 60
        assert_prefix(mine, theirs, len(prompt))


async def test_a_policy_is_loaded_by_every_rank_while_samples_are_under_way(ranks, model, tmp_path: Path) -> None:
    own, other = export(tmp_path, 0, model.tensors()), export(tmp_path, 1, model.tensors(other=True))
    before = await scores(ranks, model)
    prompt = model.reference["tokens"][1][:30].tolist()
    group = prompt_group(prompt, seeds=list(range(4)), max_tokens=300)
    undisturbed = await ranks.generate(group)
    long = asyncio.create_task(ranks.generate(group))
    await ranks.generate(prompt_group(prompt[:5], seeds=[1], max_tokens=8))
    await ranks.load_weights(other, 1)
    crossing = [pair for pair in zip(await long, undisturbed, strict=True) if len(pair[0].version_spans) == 2]
    assert crossing, "every sample ended before the update"
    for completion, whole in crossing:
        old, new = completion.version_spans
        assert (old.policy_version, new.policy_version, new.end) == (0, 1, len(completion.tokens))
        scored = np.array(await ranks.score(prompt + completion.tokens))[len(prompt) - 1 :]
        assert np.abs(scored[new.start :] - completion.logprobs[new.start :]).max() < TOLERANCE
        (after,) = await ranks.generate(prompt_group(prompt + completion.tokens[:-1], seeds=[1], max_tokens=1))
        switch = len(prompt) - 1 + new.start
        assert np.array_equal(routes_of(completion)[:switch], routes_of(whole)[:switch])
        assert np.array_equal(routes_of(completion)[switch:], routes_of(after)[switch:])
    await ranks.load_weights(own, 0)
    assert np.array_equal(await scores(ranks, model), before)


async def test_memory_of_every_rank_is_released_and_sampling_resumes(ranks, model) -> None:
    prompt = model.reference["tokens"][0].tolist()
    crowd = [prompt_group([index, *prompt], seeds=[1], max_tokens=100) for index in range(60)]
    await asyncio.gather(*map(ranks.generate, crowd))
    group = prompt_group(prompt, seeds=[1, 2], max_tokens=24)
    expected = await ranks.generate(group)
    report = await ranks.release_memory()
    assert report.freed_bytes > 12 << 20, report
    waiting = asyncio.create_task(ranks.generate(group))
    await ranks.score(prompt)
    assert not waiting.done()
    await ranks.restore_memory()
    for mine, theirs in zip(await waiting, expected, strict=True):
        assert mine.tokens == theirs.tokens and np.array_equal(routes_of(mine), routes_of(theirs))
