"""Updates and fences in every order, late, twice or never: what the worker prepares, serves and says."""

import asyncio
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from beamline.protocol import messages as m
from beamline.protocol.errors import Retryable
from beamline.rollout.fake_engine import WEIGHT_BYTES, FakeEngine
from beamline.runtime.memory_blobs import MemoryBlobStore
from rollout_bench import Bench, closed, opened
from rollout_messages import prompt_group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def told(said: list[m.Message]) -> list[tuple[str, int, int, bool]]:
    """Kind, version, attempt, and whether all is well."""
    return [
        (type(one).__name__, one.policy_version, one.attempt, not one.error)
        for one in said
        if isinstance(one, m.PolicyPrepared | m.PolicyLoaded)
    ]


def error_of(message: m.Message) -> str:
    assert isinstance(message, m.PolicyPrepared | m.PolicyLoaded)
    return message.error


class Hangs:
    """Never ends what it is asked to hold up."""

    def __init__(self, what: str, *versions: int) -> None:
        self.held = {(what, version) for version in versions}
        self.begun = asyncio.Event()

    async def __call__(self, what: str, version: int) -> None:
        if (what, version) in self.held:
            self.begun.set()
            await asyncio.Event().wait()


async def test_a_policy_is_prepared_while_the_old_one_is_served_and_activated_by_its_fence(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    (prepared,) = await bench.hear(await bench.exported(1))
    assert isinstance(prepared, m.PolicyPrepared)
    assert (prepared.policy_version, prepared.attempt, prepared.error) == (1, 1, "")
    assert prepared.num_bytes == WEIGHT_BYTES and prepared.prepare_s >= 0
    assert await bench.is_open() and bench.status.policy_version == bench.engine.policy_version == 0
    (loaded,) = await bench.hear(opened(1))
    assert isinstance(loaded, m.PolicyLoaded)
    assert (loaded.policy_version, loaded.attempt, loaded.canary_gap, loaded.error) == (1, 1, 0.0, "")
    assert await bench.is_open() and bench.status.policy_version == bench.engine.policy_version == 1


async def test_update_open_fence_and_repeats_in_any_order_load_a_policy_once(folder: Path):
    for kind in set(permutations("uuff")):
        bench = Bench(FakeEngine(), folder)
        await bench.update(0)
        update = await bench.exported(1)
        said = await bench.hear(*(update if letter == "u" else opened(1) for letter in kind))
        assert told(said) == [("PolicyPrepared", 1, 1, True), ("PolicyLoaded", 1, 1, True)], kind
        assert bench.engine.num_staged == 2 and bench.status.policy_version == 1


async def test_an_activation_is_in_the_trace_of_its_fence_though_the_update_comes_later(folder: Path):
    traces: dict[tuple[str, int], int] = {}

    async def note(what: str, version: int) -> None:
        traces[what, version] = trace.get_current_span().get_span_context().trace_id

    bench = Bench(FakeEngine(delay=note), folder)
    await bench.update(0)
    update = await bench.exported(1)
    for trace_id, message in ((7, opened(1)), (8, update)):
        with trace.use_span(NonRecordingSpan(SpanContext(trace_id, span_id=1, is_remote=True))):
            await bench.hear(message)
    assert (traces["stage", 1], traces["activate", 1]) == (8, 7)


async def test_no_group_is_taken_from_the_open_fence_on_until_its_policy_is_served(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    assert await bench.hear(opened(1)) == [], "its update is on the way"
    assert not await bench.is_open() and bench.status.waiting_for == "policy 1 to be activated"
    with pytest.raises(Retryable):
        await bench.worker.handle(prompt_group([4], seeds=[1], min_policy_version=1))
    await bench.hear(await bench.exported(1))
    assert await bench.is_open() and bench.status.waiting_for == ""


async def test_the_first_policy_waits_for_its_fence_and_says_so(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.hear(await bench.exported(0))
    assert not await bench.is_open() and bench.status.waiting_for == "the fence of policy 0"
    await bench.hear(opened(0))
    assert await bench.is_open()


async def test_what_could_not_be_prepared_is_tried_again_by_a_fence_of_a_newer_attempt(folder: Path):
    bench = Bench(FakeEngine(damaged={1}), folder)
    await bench.update(0)
    update = await bench.exported(1)
    (failed,) = await bench.hear(update)
    assert "damaged" in error_of(failed) and await bench.is_open()
    assert await bench.hear(update, closed(1, 1)) == [], "neither is a newer attempt"
    assert told(await bench.hear(closed(1, 2))) == [("PolicyPrepared", 1, 2, False)]
    bench.engine.damaged = {}
    assert told(await bench.hear(closed(1, 3), closed(1, 3))) == [("PolicyPrepared", 1, 3, True)]
    assert bench.engine.num_staged == 4
    assert told(await bench.hear(opened(1, 3))) == [("PolicyLoaded", 1, 3, True)]
    assert bench.status.policy_version == 1


async def test_a_prepared_worker_answers_for_others_retries_without_fetching_again(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    said = await bench.hear(await bench.exported(1), closed(1, 2), opened(1, 2), opened(1, 3))
    assert told(said) == [
        ("PolicyPrepared", 1, 1, True),
        ("PolicyPrepared", 1, 2, True),
        ("PolicyLoaded", 1, 2, True),
        ("PolicyLoaded", 1, 3, True),
    ]
    assert bench.engine.num_staged == 2


async def test_an_unprepared_worker_serves_nothing_until_the_next_policy(folder: Path):
    bench = Bench(FakeEngine(damaged={1}), folder)
    await bench.update(0)
    await bench.hear(await bench.exported(1), closed(1, 2))
    (loaded,) = await bench.hear(opened(1, 2))
    assert error_of(loaded) == "not prepared: policy 1: its weights are damaged"
    assert not await bench.is_open() and bench.engine.policy_version == 0
    assert bench.status.waiting_for == "a policy after 1: not prepared: policy 1: its weights are damaged"
    assert (await bench.update(2)).error == ""
    assert await bench.is_open() and bench.status.policy_version == 2


async def test_an_open_fence_of_a_newer_attempt_prepares_and_activates(folder: Path):
    bench = Bench(FakeEngine(damaged={1}), folder)
    await bench.update(0)
    await bench.hear(await bench.exported(1), opened(1))
    bench.engine.damaged = {}
    said = await bench.hear(opened(1, 2))
    assert told(said) == [("PolicyPrepared", 1, 2, True), ("PolicyLoaded", 1, 2, True)]
    assert await bench.is_open()


async def test_fetching_that_takes_too_long_ends_by_name_and_can_be_tried_again(folder: Path):
    bench = Bench(FakeEngine(delay=Hangs("stage", 1)), folder, deadline_s=0.02)
    await bench.update(0)
    (late,) = await bench.hear(await bench.exported(1))
    waited = "waited 0.02 s for the weights of policy 1 to be fetched and verified (weights.deadline_s)"
    assert error_of(late) == waited
    assert await bench.is_open() and bench.engine.staged is None
    (loaded,) = await bench.hear(opened(1))
    assert error_of(loaded) == f"not prepared: {waited}" and not await bench.is_open()
    assert (await bench.update(2)).error == "" and await bench.is_open(), "it comes back with the next policy"


async def test_a_fence_that_opens_while_a_worker_still_fetches_closes_it_at_once(folder: Path):
    hangs = Hangs("stage", 1)
    bench = Bench(FakeEngine(delay=hangs), folder, deadline_s=0.1)
    await bench.update(0)
    update = await bench.exported(1)
    fetching = asyncio.create_task(bench.policies.on_update(update))
    await hangs.begun.wait()
    assert await bench.is_open()
    opening = asyncio.create_task(bench.policies.on_fence(opened(1)))
    assert not await bench.is_open()
    await asyncio.gather(fetching, opening)
    assert told(bench.said) == [("PolicyPrepared", 1, 1, False), ("PolicyLoaded", 1, 1, False)]


async def test_a_newer_policy_replaces_one_that_was_prepared(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    await bench.hear(await bench.exported(1))
    newer = await bench.exported(2)
    await bench.blobs.release("policy")
    (failed,) = await bench.hear(newer)
    assert newer.manifest.key in error_of(failed)
    assert bench.engine.staged is None, "the older one is let go of, whatever becomes of the newer"
    (loaded,) = await bench.hear(opened(1))
    assert error_of(loaded) == "policy 1 was not prepared: this worker has heard of policy 2 instead"
    assert bench.engine.policy_version == 0 and bench.status.waiting_for == "the fence of policy 2"


async def test_a_worker_that_was_started_anew_activates_at_once_what_it_finds_on_the_bus(folder: Path):
    blobs = MemoryBlobStore()
    before = Bench(FakeEngine(), folder, blobs=blobs)
    update = await before.exported(1)
    await before.hear(update)
    for kept in permutations([update, opened(1, 2)]):
        bench = Bench(FakeEngine(), folder, blobs=blobs)
        said = await bench.hear(*kept)
        assert told(said)[-1] == ("PolicyLoaded", 1, 2, True)
        assert await bench.is_open() and bench.status.policy_version == 1


async def test_a_worker_that_was_started_between_two_policies_waits_for_the_newer_ones_fence(folder: Path):
    """The older one's update is not on the bus any more, and its owner may have let go of its weights."""
    blobs = MemoryBlobStore()
    update = await Bench(FakeEngine(), folder, blobs=blobs).exported(2)
    for kept in permutations([update, opened(1)]):
        bench = Bench(FakeEngine(), folder, blobs=blobs)
        assert sorted(told(await bench.hear(*kept))) == [("PolicyLoaded", 1, 1, False), ("PolicyPrepared", 2, 1, True)]
        assert not await bench.is_open() and bench.status.waiting_for == "the fence of policy 2"
        assert told(await bench.hear(closed(1, 2))) == [("PolicyPrepared", 1, 2, False)], "nobody waits for it"
        assert told(await bench.hear(opened(2))) == [("PolicyLoaded", 2, 1, True)]
        assert await bench.is_open()


async def test_what_a_former_life_of_the_run_left_on_the_bus_does_not_hold_up_an_older_policy(folder: Path):
    bench = Bench(FakeEngine(damaged={7}), folder)
    await bench.hear(await bench.exported(7), opened(7))
    assert not await bench.is_open()
    assert told(await bench.hear(await bench.exported(5), opened(5))) == [
        ("PolicyPrepared", 5, 1, True),
        ("PolicyLoaded", 5, 1, True),
    ]
    assert await bench.is_open()


@pytest.mark.parametrize("candidate", [False, True], ids=["alone", "beside a prepared one"])
async def test_a_stale_policy_is_refused_and_nothing_is_touched(folder: Path, candidate: bool):
    bench = Bench(FakeEngine(), folder)
    old = await bench.exported(3)
    await bench.update(5)
    if candidate:
        await bench.hear(await bench.exported(6))
    staged = bench.engine.num_staged
    said = list(await bench.hear(old, closed(3, 2), opened(3, 2)))
    assert told(said) == [
        ("PolicyPrepared", 3, 1, False),
        ("PolicyPrepared", 3, 2, False),
        ("PolicyLoaded", 3, 2, False),
    ]
    assert {error_of(one) for one in said} == {"policy 3 is stale: policy 5 is served"}
    assert await bench.is_open() and bench.status.policy_version == bench.engine.policy_version == 5
    assert bench.engine.num_staged == staged
    if candidate:
        assert told(await bench.hear(opened(6))) == [("PolicyLoaded", 6, 1, True)]


async def test_other_weights_under_the_served_version_are_refused(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(5)
    said = list(await bench.hear(await bench.exported(5, value=7.0), opened(5, 2)))
    assert told(said) == [("PolicyPrepared", 5, 1, False), ("PolicyLoaded", 5, 2, False)]
    assert error_of(said[0]) == "policy 5 is served with other weights: a new policy needs a new version"
    assert bench.engine.num_staged == 1 and await bench.is_open()


async def test_the_served_weights_from_an_owner_that_was_started_anew_are_recognised(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    again = await bench.exported(0)
    assert told(await bench.hear(again, opened(0, 2))) == [("PolicyPrepared", 0, 1, True), ("PolicyLoaded", 0, 2, True)]
    assert bench.engine.num_staged == 1 and await bench.is_open()


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\x80\x04}\x94\x8c\x0epolicy_version\x94K\x01s.", "25 bytes are not a weight manifest"),
        (b"cposix\nsystem\n(S'exit 1'\ntR.", "28 bytes are not a weight manifest"),
        (b"", "0 bytes are not a weight manifest"),
    ],
    ids=["pickled", "a pickled call", "nothing"],
)
async def test_a_blob_that_is_no_manifest_is_refused(folder: Path, payload: bytes, words: str):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    hostile = msgspec.structs.replace(
        await bench.exported(1), manifest=await bench.blobs.put("policy", "weight_manifest", payload)
    )
    (failed,) = await bench.hear(hostile)
    assert words in error_of(failed)
    assert bench.engine.num_staged == 1 and await bench.is_open()


async def test_a_manifest_that_was_damaged_or_is_another_policys_is_refused(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    update, other = await bench.exported(1), await bench.exported(2)
    swapped = msgspec.structs.replace(update, manifest=other.manifest)
    (failed,) = await bench.hear(swapped)
    assert error_of(failed) == "policy 1 came with the manifest of policy 2"
    stored = bench.blobs.blobs["policy"]
    stored[update.manifest.key] = stored[update.manifest.key][:-1] + b"?"
    (failed,) = await bench.hear(update)
    assert update.manifest.key in error_of(failed) and "checksum" in error_of(failed)
    assert bench.engine.num_staged == 1 and await bench.is_open()
