"""Adapters as a policy: fetched beside what is served, judged, and swapped while requests are under way."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.rollout.engine import Completion, Pause
from beamline.runtime.deadline import deadline
from rollout_messages import export, readers_are
from served_adapters import (
    HALVED,
    LORA,
    MODEL,
    NUM_UNDER_WAY,
    SCORED_TOLERANCE,
    TOLERANCE,
    VARIANT,
    WORKER,
    Served,
    adapters,
    assert_sampled_from,
    halved,
    one_span,
    scored,
    serving,
    versions_of,
)
from shared_memory import segments
from tiny_engines import load, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_SWAPS = 20
FLAT_BYTES = 1 << 20
"""A process's memory may grow by so much between the fifth swap and the last, which are 6 MiB of adapters apart."""
FLAT_UNDER_LOAD_BYTES = 12 << 20
"""And by so much in twenty swaps under load after the first twenty."""
CROWD_S = 30.0


async def test_adapters_are_staged_beside_what_is_served_and_only_they_are_moved(served: Served, caplog) -> None:
    tensors = halved(adapters())
    with caplog.at_level("INFO"):
        num_bytes = await served.engine.stage_weights(served.offer(tensors))
    assert num_bytes == sum(array.nbytes for array in tensors.values())
    (said,) = [record.message for record in caplog.records if "of the full model's" in record.message]
    assert "adapters 0.4 MiB of the full model's 6.4 MiB (6.0 %)" in said
    await readers_are(0)
    await served.assert_serves()
    await served.assert_serves(HALVED, "staged")
    assert np.abs(await served.scores("base") - served.base).max() < TOLERANCE
    await served.engine.activate_weights()
    await served.assert_serves(HALVED)


async def test_two_versions_and_the_model_itself_are_sampled_in_one_batch(served: Served) -> None:
    """Each by its own adapters, with its own prefixes and routes, and its spans say so."""
    engine, call = served.engine, served.engine._call
    group = served.group(0, num_samples=4, max_tokens=240)
    begun = asyncio.create_task(engine.generate(group))
    await engine.generate(served.group(1, max_tokens=4))
    manifest = served.offer(halved(adapters()))
    await engine.stage_weights(manifest)
    await call("watch")
    await engine.activate_weights("overlap")
    following = asyncio.create_task(engine.generate(group))
    base = await served.scores("base")
    old, new = await begun, await following
    together, _ = (await call("noted"))[0]
    assert [served.version, manifest.policy_version] in together and any(-1 in versions for versions in together)
    assert np.abs(base - served.base).max() < TOLERANCE
    await served.assert_serves(HALVED)
    alone = await engine.generate(group)
    for mine, theirs in zip(new, alone, strict=True):
        assert mine.tokens == theirs.tokens and np.array_equal(routes_of(mine), routes_of(theirs))
    await engine.stage_weights(export(served.folder, served.version, adapters()))
    for completion in old:
        assert one_span(completion, served.version)
        await assert_sampled_from(served, group, completion, "staged")
    for completion in new:
        assert one_span(completion, manifest.policy_version)
        await assert_sampled_from(served, group, completion, "served")
    assert [completion.tokens for completion in old] != [completion.tokens for completion in new]


async def test_requests_under_way_go_on_under_new_adapters_where_they_are_kept(served: Served) -> None:
    group = served.group(0, num_samples=4, max_tokens=240)
    begun = asyncio.create_task(served.engine.generate(group))
    await served.engine.generate(served.group(1, max_tokens=8))
    manifest = served.offer(halved(adapters()))
    await load(served.engine, manifest, "keep")
    for completion in await begun:
        before, after = completion.version_spans
        assert (before.policy_version, after.policy_version) == (served.version, manifest.policy_version)
        assert 0 < before.end == after.start < after.end == len(completion.tokens)
        anew = await scored(served, group, completion)
        assert np.abs(anew - completion.logprobs)[after.start :].max() < SCORED_TOLERANCE
        assert np.abs(anew - completion.logprobs)[: after.start].max() > 0.1


class Crowd:
    """Requests, of which always as many are under way."""

    def __init__(self, served: Served, current: int) -> None:
        self.current = current
        """Version for those that come."""
        self.ended: list[tuple[int, m.PromptGroup, Completion]] = []
        """With the version under which each began."""
        self._served = served
        self._numbers = count()
        self._goes_on = True
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Inside, and until all have ended."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_UNDER_WAY):
                tasks.create_task(self._follow_each_other())
            yield
            self._goes_on = False

    async def further(self, num_requests: int) -> None:
        """So many more have ended."""
        enough = len(self.ended) + num_requests
        async with deadline(CROWD_S, f"{num_requests} requests to end"), self._changed:
            await self._changed.wait_for(lambda: len(self.ended) >= enough)

    async def _follow_each_other(self) -> None:
        while self._goes_on:
            number = next(self._numbers)
            group, began = self._served.group(number, max_tokens=8 + number % 40), self.current
            (completion,) = await self._served.engine.generate(group)
            async with self._changed:
                self.ended.append((began, group, completion))
                self._changed.notify_all()


def written_by_this_process() -> set[str]:
    """Files that it has open for writing."""
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target, flags = os.readlink(link), Path(f"/proc/self/fdinfo/{link.name}").read_text().split()
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("/") and int(flags[flags.index("flags:") + 1], 8) & (os.O_WRONLY | os.O_RDWR):
            found.add(target)
    return found - {target for target in found if "memfd:" in target}


async def test_twenty_swaps_under_load(served: Served) -> None:
    """No error, every span right, no file written; and no memory, once the shapes of batches have been met."""
    resident: list[int] = []
    for pause in ("keep", "overlap"):
        await swap_under_load(served, pause)
        resident += await served.engine._call("resident_beside_cache")
    assert resident[1] - resident[0] < FLAT_UNDER_LOAD_BYTES, resident


async def swap_under_load(served: Served, pause: Pause) -> None:
    engine, call, first = served.engine, served.engine._call, served.new_version()
    tensors = {first: adapters()}
    await load(engine, export(served.folder, first, tensors[first]), pause)
    files = {*served.folder.parent.rglob("*"), *Path.cwd().iterdir()}, segments(), written_by_this_process()
    await call("watch")
    crowd = Crowd(served, first)
    async with crowd.under_way():
        for number in range(NUM_SWAPS):
            await crowd.further(8)
            manifest = served.offer(adapters(seed=number + 1))
            tensors[manifest.policy_version] = adapters(seed=number + 1)
            await engine.stage_weights(manifest, 30.0)
            await engine.activate_weights(pause)
            crowd.current = manifest.policy_version
        await crowd.further(NUM_UNDER_WAY)
    together, written = (await call("noted"))[0]
    assert written == []
    assert files == (
        {*served.folder.parent.rglob("*"), *Path.cwd().iterdir()},
        segments(),
        written_by_this_process(),
    )
    assert {version for _, _, completion in crowd.ended for version in versions_of(completion)} >= tensors.keys()
    assert (max(map(len, together)) > 1) is (pause == "overlap")
    for began, _, completion in crowd.ended:
        assert_spans(completion, began, pause)
    await assert_spans_say_who_sampled(served, crowd, tensors)


@pytest.mark.parametrize("pause", ["keep", "overlap"])
async def test_swaps_take_no_memory(served: Served, pause: Pause) -> None:
    """Without requests, whose own heap grows for a while."""
    resident: list[int] = []
    for number in range(NUM_SWAPS):
        await load(served.engine, served.offer(adapters(seed=number)), pause)
        resident += await served.engine._call("resident_beside_cache")
    assert resident[-1] - resident[4] < FLAT_BYTES, resident


def assert_spans(completion: Completion, began: int, pause: Pause) -> None:
    """They cover it, in order, from the version that is served when it begins; one that overlaps has that alone."""
    assert completion.finish_reason in (m.FinishReason.STOP, m.FinishReason.LENGTH)
    spans = completion.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(completion.tokens)
    versions = versions_of(completion)
    assert versions == sorted(set(versions)) and versions[0] >= began
    assert pause == "keep" or len(versions) == 1


async def assert_spans_say_who_sampled(served: Served, crowd: Crowd, tensors: Mapping[int, object]) -> None:
    """Compute, for two completions of every version, those that saw most, each of its tokens under that version."""
    for version in tensors:
        seen = [(group, done) for _, group, done in crowd.ended if version in versions_of(done)]
        chosen = sorted(seen, key=lambda one: -len(one[1].version_spans))[:2]
        await served.engine.stage_weights(export(served.folder, version, tensors[version]))
        for group, completion in chosen:
            (span,) = [span for span in completion.version_spans if span.policy_version == version]
            gap = np.abs(await scored(served, group, completion, "staged") - completion.logprobs)
            assert gap[span.start : span.end].max() < SCORED_TOLERANCE
    await served.engine.drop_staged()


@pytest.mark.parametrize("layout", ["tensor_parallel", "pipeline_parallel"])
async def test_engines_of_two_ranks_swap_adapters_together(models, start, tmp_path: Path, layout: str) -> None:
    async with start(models[MODEL].path, worker=WORKER, lora=LORA, **{layout: 2}) as engine:
        served = await serving(engine, tmp_path)
        group = served.group(0, num_samples=2, max_tokens=100)
        begun = asyncio.create_task(engine.generate(group))
        await engine.generate(served.group(1, max_tokens=4))
        manifest = served.offer(halved(adapters()), parts=2)
        await engine.stage_weights(manifest)
        await served.assert_serves(VARIANT)
        await engine.activate_weights("overlap")
        await served.assert_serves(HALVED)
        assert all(one_span(completion, served.version) for completion in await begun)
        (after,) = await engine.generate(served.group(3, max_tokens=20))
        assert one_span(after, manifest.policy_version)
