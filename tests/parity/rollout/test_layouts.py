"""Two ranks, by tensor or by pipeline, are one engine: log-probabilities, routes, policies and memory are the same."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.protocol.blobs import RoutedExperts, VersionSpan, decode_blob
from beamline.protocol.errors import Rejected
from beamline.rollout.checkpoint import routing_shape
from rollout_bench import Bench
from rollout_messages import export, policy_update, prompt_group
from tiny_engines import assert_prefix, load, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4


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
        assert mine.finish_reason is m.FinishReason.ABORT and 0 < len(mine.tokens) < 60
        assert_prefix(mine, theirs, len(prompt))


async def test_a_policy_is_loaded_by_every_rank_while_samples_are_under_way(ranks, model, tmp_path: Path) -> None:
    own, other = export(tmp_path, 0, model.tensors()), export(tmp_path, 1, model.tensors(other=True))
    before = await scores(ranks, model)
    prompt = model.reference["tokens"][1][:30].tolist()
    group = prompt_group(prompt, seeds=list(range(4)), max_tokens=300)
    undisturbed = await ranks.generate(group)
    long = asyncio.create_task(ranks.generate(group))
    await ranks.generate(prompt_group(prompt[:5], seeds=[1], max_tokens=8))
    await load(ranks, other)
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
    await load(ranks, own)
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


LOST = {"tensor_parallel": ["first"], "pipeline_parallel": ["first", "last", "unsent"]}
"""What may be missing, in the words of `LossyWorker.lose_rows`; ranks by tensor are one stage, first and last."""


async def test_a_stage_without_rows_fails_its_group_by_name_and_the_next_is_served(
    ranks, layout: str, model, tmp_path: Path
) -> None:
    """The next group has the same prompt: rows that were kept with cached keys and values are not handed out again."""
    shape = routing_shape(model.path)
    assert shape is not None
    bench = Bench(ranks, tmp_path, shape=shape)
    ref = await bench.blobs.put("policy", "weight_manifest", export(tmp_path, 0, model.tensors()).encode())
    tokens, logprobs = (model.reference[name][0].tolist() for name in ("tokens", "logprobs"))
    await bench.serve(policy_update(0, ref, m.Canary(tokens=tokens, logprobs=logprobs)))
    group = prompt_group(tokens[:70], seeds=[1, 2], max_tokens=8)
    expected = await ranks.generate(group)
    for fault in LOST[layout]:
        await load(ranks, export(tmp_path, 0, model.tensors()))
        await ranks._call("lose_rows", fault)
        layer = 2 if fault == "last" else shape.sparse_layers[0]
        words = (
            f"routed experts of group {group.group_id}, trajectory [01]: expected {shape.top_k} different experts "
            rf"below {shape.num_experts} in row 0, layer {layer}, found \[0, 0, 0, 0\]: nothing was written"
        )
        with pytest.raises(Rejected, match=words) as rejected:
            await bench.worker.handle(group)
        failed = bench.worker.on_rejected(group, rejected.value)
        assert (failed.kind, failed.retryable, failed.group_id) == ("routed_experts", False, group.group_id)
        await ranks._call("lose_rows", "")
        answer = await bench.worker.handle(group)
        assert isinstance(answer, m.TrajectoryGroup) and answer.routed_experts is not None
        routed = decode_blob(RoutedExperts, await bench.blobs.get(answer.routed_experts))
        ids_RLK = np.frombuffer(routed.ids, routed.dtype).reshape(-1, routed.num_layers, routed.top_k)
        assert np.array_equal(np.sort(ids_RLK, -1), np.concatenate([routes_of(one) for one in expected]))
