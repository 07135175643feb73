"""What becomes of samples under way when a policy is activated, by mode; "keep" is shown in test_policies."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.messages import FinishReason
from beamline.rollout.continuation import Part, Sample
from rollout_messages import export, prompt_group, readers_are
from tiny_engines import assert_prefix, load, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def other(engine, model, tmp_path: Path):
    """Another policy, staged; the engine's own is put back at the end."""
    own, other = export(tmp_path, 0, model.tensors()), export(tmp_path, 1, model.tensors(other=True))
    await engine.stage_weights(other)
    yield other
    await load(engine, own)


def long_group(model, num_samples: int = 6):
    prompt = model.reference["tokens"][1][:30].tolist()
    return prompt_group(prompt, seeds=list(range(num_samples)), max_tokens=200)


async def under_way(engine, group) -> asyncio.Task:
    """The group's samples, some tokens after their start."""
    long = asyncio.create_task(engine.generate(group))
    await engine.generate(prompt_group(group.prompt_tokens[:5], seeds=[1], max_tokens=8))
    return long


def assert_undisturbed(completions, expected) -> None:
    """As they were sampled alone, but for the last bits, which depend on what else a step computes."""
    for mine, theirs in zip(completions, expected, strict=True):
        assert mine.finish_reason is theirs.finish_reason and one_span(mine, 0)
        assert mine.tokens == theirs.tokens and np.array_equal(routes_of(mine), routes_of(theirs))
        assert np.abs(np.array(mine.logprobs) - theirs.logprobs).max() < 1e-4


def one_span(completion, version: int) -> bool:
    return completion.version_spans == [VersionSpan(version, 0, len(completion.tokens))]


async def test_drain_waits_for_samples_under_way_and_holds_back_those_that_come(engine, model, other) -> None:
    group = long_group(model)
    undisturbed = await engine.generate(group)
    long = await under_way(engine, group)
    activating = asyncio.create_task(engine.activate_weights("drain"))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(prompt_group(group.prompt_tokens, seeds=[1, 2], max_tokens=8)))
    stopped, stop = prompt_group(group.prompt_tokens, seeds=[3], max_tokens=8), asyncio.Event()
    held = asyncio.create_task(engine.generate(stopped, stop))
    stop.set()
    (nothing,) = await held
    assert (nothing.tokens, nothing.finish_reason) == ([], FinishReason.ABORT) and not long.done()
    async with asyncio.timeout(30):
        await activating
    assert long.done() and not late.done()
    assert_undisturbed(await long, undisturbed)
    assert all(one_span(completion, 1) for completion in await late)


async def test_a_drain_that_is_given_up_leaves_the_old_policy_and_takes_requests(engine, model, other) -> None:
    group = long_group(model)
    undisturbed = await engine.generate(group)
    long = await under_way(engine, group)
    activating = asyncio.create_task(engine.activate_weights("drain"))
    await asyncio.sleep(0)
    activating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await activating
    short = prompt_group(group.prompt_tokens, seeds=[1], max_tokens=4)
    assert one_span((await engine.generate(short))[0], 0) and not long.done()
    await readers_are(1)
    await engine.drop_staged()
    await readers_are(0)
    assert_undisturbed(await long, undisturbed)


async def test_abort_hands_out_what_there_is_of_the_old_policy(engine, model, other) -> None:
    group = long_group(model)
    undisturbed = await engine.generate(group)
    long = await under_way(engine, group)
    async with asyncio.timeout(10):
        await engine.activate_weights("abort")
        aborted = await long
    for mine, whole in zip(aborted, undisturbed, strict=True):
        assert mine.finish_reason is FinishReason.ABORT and 0 < len(mine.tokens) < len(whole.tokens)
        assert_prefix(mine, whole, len(group.prompt_tokens))
    assert one_span((await engine.generate(prompt_group(group.prompt_tokens, seeds=[1], max_tokens=4)))[0], 1)


async def test_continued_samples_are_joined_token_by_token(engine, model, other, tmp_path: Path) -> None:
    group = long_group(model)
    num_prompt = len(group.prompt_tokens)
    undisturbed = await engine.generate(group)
    long = await under_way(engine, group)
    await engine.activate_weights("continue")
    completions = await long
    for mine, whole in zip(completions, undisturbed, strict=True):
        old, new = mine.version_spans
        assert (old.policy_version, old.start, old.end) == (0, 0, new.start) and old.end > 0
        assert (new.policy_version, new.end) == (1, len(mine.tokens)) and new.end > new.start
        assert mine.tokens[: new.start] == whole.tokens[: new.start]
        assert len(mine.tokens) == len(mine.logprobs) <= 200 and mine.finish_reason is not FinishReason.ABORT
        assert (mine.finish_reason is FinishReason.LENGTH) == (len(mine.tokens) == 200)
        scored = np.array(await engine.score(group.prompt_tokens + mine.tokens))[num_prompt - 1 :]
        assert np.abs(scored[new.start :] - mine.logprobs[new.start :]).max() < 1e-4
        again = prompt_group(group.prompt_tokens + mine.tokens[:-1], seeds=[1], max_tokens=1)
        (after,) = await engine.generate(again)
        switch = num_prompt - 1 + new.start
        assert np.array_equal(routes_of(mine)[:switch], routes_of(whole)[:switch])
        assert np.array_equal(routes_of(mine)[switch:], routes_of(after)[switch:])
    await load(engine, export(tmp_path, 0, model.tensors()))
    for mine in completions:
        scored = np.array(await engine.score(group.prompt_tokens + mine.tokens))[num_prompt - 1 :]
        end = mine.version_spans[0].end
        assert np.abs(scored[:end] - mine.logprobs[:end]).max() < 1e-4


async def test_samples_are_continued_whatever_state_they_are_in(engine, model, other) -> None:
    """Memory is released, more samples wait than the engine runs at a time, and some are stopped in the end."""
    group, stop = long_group(model, num_samples=40), asyncio.Event()
    long = asyncio.create_task(engine.generate(group, stop))
    await engine.generate(prompt_group(group.prompt_tokens[:5], seeds=[1], max_tokens=8))
    await engine.release_memory()
    await engine.activate_weights("continue")
    await engine.restore_memory()
    await engine.generate(prompt_group(group.prompt_tokens[:5], seeds=[1], max_tokens=8))
    stop.set()
    async with asyncio.timeout(10):
        completions = await long
    begun = [completion for completion in completions if completion.tokens]
    crossing = [completion for completion in begun if len(completion.version_spans) == 2]
    assert crossing and all(completion.version_spans[-1].policy_version == 1 for completion in crossing)
    assert any(completion.finish_reason is FinishReason.ABORT for completion in crossing)
    for completion in begun:
        assert len(routes_of(completion)) == len(group.prompt_tokens) + len(completion.tokens) - 1


async def test_a_stop_text_may_begin_before_the_cut(engine, model, other) -> None:
    prompt = model.reference["tokens"][0][:20].tolist()
    greedy = prompt_group(prompt, seeds=[0], max_tokens=12, temperature=0.0)
    (whole,) = await engine.generate(greedy)
    cut = len(whole.tokens) - 3
    text = engine._tokenizer.decode(whole.tokens[cut - 2 : cut + 1], skip_special_tokens=False)
    sampling = msgspec.structs.replace(greedy.sampling, stop=[text])
    sample = Sample(msgspec.structs.replace(greedy, sampling=sampling), 0)
    sample.continues = True
    sample.add(
        Part(
            tokens=whole.tokens[:cut],
            logprobs=whole.logprobs[:cut],
            finish_reason=FinishReason.ABORT,
            version_spans=[VersionSpan(0, 0, cut)],
            routed_experts=whole.routed_experts[: len(prompt) + cut - 1],
        )
    )
    completion = await engine._sample(sample)
    assert (completion.tokens, completion.finish_reason) == (whole.tokens[: cut + 1], FinishReason.STOP)
    assert completion.version_spans == [VersionSpan(0, 0, cut + 1)]
    assert np.array_equal(routes_of(completion), routes_of(whole)[: len(prompt) + cut])
