"""A live engine changes its policy in place: as if it had been started on the new weights, and back without a trace."""

import asyncio
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.errors import WeightError
from beamline.weights.manifest import WeightManifest
from loaded_weights import PAGE_BYTES
from rollout_messages import close_owners, damage, export, prompt_group, readers_are
from tiny_engines import ROUNDING, assert_same, load, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def scores(engine, model) -> np.ndarray:
    return np.array([await engine.score(tokens.tolist()) for tokens in model.reference["tokens"]])


@pytest.fixture
def own(model, tmp_path: Path):
    return export(tmp_path, 0, model.tensors())


@pytest.fixture
def other(model, tmp_path: Path):
    return export(tmp_path, 1, model.tensors(other=True))


async def test_an_update_equals_a_fresh_start_and_the_way_back_leaves_no_trace(
    engine, start, model, own, other
) -> None:
    prompt = model.reference["tokens"][0][:64].tolist()
    group = prompt_group(prompt, seeds=[1, 2, 3], max_tokens=24)
    own_scores, own_completions = await scores(engine, model), await engine.generate(group)
    await load(engine, other)
    other_scores, other_completions = await scores(engine, model), await engine.generate(group)
    await load(engine, own)
    assert np.abs(other_scores - own_scores).max() > 1, "the two policies hardly differ: nothing is shown"
    assert np.array_equal(await scores(engine, model), own_scores)
    assert_same(await engine.generate(group), own_completions)
    async with start(model.other_path) as fresh:
        assert np.abs(await scores(fresh, model) - other_scores).max() < ROUNDING
        fresh_completions = await fresh.generate(group)
    assert [c.tokens for c in fresh_completions] == [c.tokens for c in other_completions]
    for mine, theirs in zip(other_completions, fresh_completions, strict=True):
        assert np.abs(np.array(mine.logprobs) - theirs.logprobs).max() < ROUNDING
        assert mine.version_spans == [VersionSpan(1, 0, len(mine.tokens))]
        assert np.array_equal(routes_of(mine), routes_of(theirs))


async def test_samples_under_way_go_on_under_the_new_policy_and_say_where_it_began(engine, model, own, other) -> None:
    prompt = model.reference["tokens"][1][:30].tolist()
    group = prompt_group(prompt, seeds=list(range(8)), max_tokens=300)
    undisturbed = await engine.generate(group)
    long = asyncio.create_task(engine.generate(group))
    await engine.generate(prompt_group(prompt[:5], seeds=[1], max_tokens=8))
    await load(engine, other)
    completions = await long
    pairs = zip(completions, undisturbed, strict=True)
    crossing = [(completion, before) for completion, before in pairs if len(completion.version_spans) == 2]
    assert crossing, "every sample ended before the update"
    for completion, before in crossing:
        old, new = completion.version_spans
        assert (old.policy_version, old.start, old.end) == (0, 0, new.start)
        assert (new.policy_version, new.end) == (1, len(completion.tokens))
        scored = np.array(await engine.score(prompt + completion.tokens))[len(prompt) - 1 :]
        assert np.abs(scored[new.start :] - completion.logprobs[new.start :]).max() < 1e-4
        (after,) = await engine.generate(prompt_group(prompt + completion.tokens[:-1], seeds=[1], max_tokens=1))
        # The row of token i is of the forward that sampled token i + 1: the prompt's are the old policy's, too.
        switch = len(prompt) - 1 + new.start
        assert np.array_equal(routes_of(completion)[:switch], routes_of(before)[:switch])
        assert np.array_equal(routes_of(completion)[switch:], routes_of(after)[switch:])
        assert not np.array_equal(routes_of(after)[:switch], routes_of(before)[:switch]), "the policies route alike"
    await load(engine, own)


async def test_ten_flips_between_two_policies_leave_no_trace(engine, model, own, other) -> None:
    group = prompt_group(model.reference["tokens"][0][:64].tolist(), seeds=[1, 2], max_tokens=8)
    before, completions = await scores(engine, model), await engine.generate(group)
    await load(engine, other)
    others = await scores(engine, model)
    for _ in range(10):
        await load(engine, own)
        assert np.array_equal(await scores(engine, model), before)
        await load(engine, other)
        assert np.array_equal(await scores(engine, model), others)
    await load(engine, own)
    assert_same(await engine.generate(group), completions)


NORM, ROUTER = "model.norm.weight", "model.layers.2.mlp.gate.weight"


def refused_weights(tensors: dict[str, np.ndarray], folder: Path, fault: str) -> WeightManifest:
    """Another policy, with one fault."""
    match fault:
        case "unknown":
            tensors["model.norms.weight"] = tensors[NORM]
        case "missing":
            del tensors[NORM]
        case "shape":
            tensors[NORM] = tensors[NORM][:-1]
        case "integers":
            tensors[NORM] = tensors[NORM].astype(np.int8)
        case "no float":
            tensors[NORM] = tensors[NORM].astype(np.bool_)
    manifest = export(folder, 9, tensors)
    if fault == "damaged":
        damage(manifest, NORM)
    elif fault == "gone":
        export(folder, 10, tensors)
        export(folder, 11, tensors)
    elif fault == "no owner":
        close_owners()
    return manifest


REFUSALS = {
    "damaged": rf"rank 0 of 1: policy 9: tensor {NORM} has checksum [0-9a-f]+, expected [0-9a-f]+",
    "unknown": r"policy 9: tensor model\.norms\.weight is unknown to the model; the nearest it has is model\.norm\.",
    "missing": rf"policy 9: tensor {NORM} is missing, one of 1: export the whole model",
    "shape": rf"policy 9: tensor {NORM} has shape \[127\], the model's is \[128\]",
    "integers": rf"rank 0 of 1: policy 9: tensor {NORM} is int8, the engine holds float32: export it in",
    "no float": rf"rank 0 of 1: policy 9: tensor {NORM} is bool, the engine holds float32",
    "gone": "rank 0 of 1: policy 9: .* refuses its weights: the policies that are kept are 10, 11",
    "no owner": "rank 0 of 1: policy 9: cannot get its weights from .*: ",
}


@pytest.mark.parametrize("fault", REFUSALS)
async def test_refused_weights_change_nothing(engine, model, tmp_path: Path, fault: str) -> None:
    before = await scores(engine, model)
    group = prompt_group([5, 6, 7], seeds=[1], max_tokens=4)
    completions = await engine.generate(group)
    manifest = refused_weights(model.tensors(other=True), tmp_path, fault)
    with pytest.raises(WeightError, match=REFUSALS[fault]):
        await engine.stage_weights(manifest)
    await readers_are(0)
    with pytest.raises(WeightError, match="no policy is staged"):
        await engine.activate_weights()
    assert np.array_equal(await scores(engine, model), before)
    assert_same(await engine.generate(group), completions)


async def test_a_staged_policy_changes_nothing_until_it_is_activated_and_can_be_dropped(
    engine, model, own, other, tmp_path: Path
) -> None:
    before = await scores(engine, model)
    await engine.stage_weights(other)
    await readers_are(1)
    assert np.array_equal(await scores(engine, model), before)
    await engine.drop_staged()
    await engine.drop_staged()
    with pytest.raises(WeightError, match="no policy is staged"):
        await engine.activate_weights()
    await engine.stage_weights(other)
    await engine.stage_weights(own)
    await engine.activate_weights()
    assert np.array_equal(await scores(engine, model), before)
    await readers_are(0)


async def test_samples_go_on_while_a_policy_is_fetched_from_an_owner_that_does_not_answer(
    engine, model, other, owner_socket: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(owner_socket))
        owner.listen()
        place = msgspec.structs.replace(other.places[0], socket=str(owner_socket))
        staging = asyncio.create_task(engine.stage_weights(msgspec.structs.replace(other, places=[place])))
        await engine.generate(prompt_group([5, 6, 7], seeds=[1], max_tokens=100))
        assert not staging.done()
    owner_socket.unlink()
    with pytest.raises(WeightError, match=r"gave no answer|cannot get its weights"):
        await staging


async def test_released_memory_goes_back_to_the_machine_and_sampling_resumes_where_it_was(engine, model, own, other):
    prompt = model.reference["tokens"][0].tolist()
    before = await scores(engine, model)
    # As many different tokens as the cache holds, or nearly: every block has been written.
    crowd = [prompt_group([index, *prompt], seeds=[1, 2], max_tokens=200) for index in range(60)]
    await asyncio.gather(*map(engine.generate, crowd))
    group = prompt_group(prompt, seeds=[1, 2], max_tokens=24)
    expected = await engine.generate(group)
    report = await engine.release_memory()
    assert report.freed_bytes > 24 << 20 and report.kept_bytes == 0, report
    again = await engine.release_memory()
    assert again.freed_bytes == 0 and again.kept_bytes == 0 and again.after_bytes <= report.after_bytes + (1 << 20)
    await load(engine, other)
    await load(engine, own)
    assert np.array_equal(await scores(engine, model), before), "the canary is scored while memory is released"
    waiting = asyncio.create_task(engine.generate(group))
    await engine.score(prompt)
    assert not waiting.done()
    await engine.restore_memory()
    for mine, theirs in zip(await waiting, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert np.abs(np.array(mine.logprobs) - theirs.logprobs).max() < 1e-4
        assert np.array_equal(routes_of(mine), routes_of(theirs))


async def test_samples_under_way_while_memory_is_released_keep_tokens_and_routes(engine, model) -> None:
    group = prompt_group(model.reference["tokens"][1][:50].tolist(), seeds=[1, 2, 3, 4], max_tokens=250)
    expected = await engine.generate(group)
    long = asyncio.create_task(engine.generate(group))
    await engine.generate(prompt_group([5, 6, 7], seeds=[1], max_tokens=8))
    assert (await engine.release_memory()).freed_bytes > 0
    assert not long.done(), "every sample ended before the release"
    await engine.restore_memory()
    for mine, theirs in zip(await long, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert np.array_equal(routes_of(mine), routes_of(theirs))


async def test_memory_that_is_not_given_back_is_counted(engine, model) -> None:
    await engine._call("lock_cache", 5)
    assert (await engine.release_memory()).kept_bytes == 5 * PAGE_BYTES
    assert (await engine.release_memory()).kept_bytes == 5 * PAGE_BYTES
    await engine._call("lock_cache", 0)
    await engine.restore_memory()
    assert (await engine.release_memory()).kept_bytes == 0
    await engine.restore_memory()
