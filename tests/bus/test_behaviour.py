"""What every bus promises, on a real nats-server and on the in-memory hub."""

import asyncio
from collections import Counter

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from beamline.protocol import messages as m
from beamline.protocol.errors import DeadlineExceeded, Rejected, Retryable
from beamline.runtime.deadline import deadline
from beamline.runtime.nats_bus import NatsBus
from brokers import Broker, Collector, Tasks
from bus_messages import group_failed, heartbeat, phase, prompt_group, status_reply


async def test_every_input_gets_its_result(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    collected = Collector()

    async def handle(group: m.Message) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        return group_failed(group)

    tasks.start(rollout.work("rollout", handle, concurrency=4))
    tasks.start(coordinator.work("coordinator", collected))
    for index in range(30):
        await coordinator.publish(prompt_group(index))
    await collected.until(30)


async def test_a_repeat_is_stored_once(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    for _ in range(3):
        await coordinator.publish(prompt_group(0))
    await coordinator.publish(prompt_group(1))
    collected = Collector()
    working = tasks.start(rollout.work("rollout", collected))
    await collected.until(2)
    await tasks.cancel(working)
    if isinstance(rollout, NatsBus):
        assert Counter(collected.ids) == {"group-0": 1, "group-1": 1}


async def test_at_most_concurrency_handlers_and_all_slots_used(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    running, most, full, go = 0, 0, asyncio.Event(), asyncio.Event()
    collected = Collector()

    async def handle(group: m.Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            full.set()
        await go.wait()
        running -= 1
        await collected(group)

    for index in range(12):
        await coordinator.publish(prompt_group(index))
    tasks.start(rollout.work("rollout", handle, concurrency=4))
    async with deadline(5, "four handlers at once"):
        await full.wait()
    go.set()
    await collected.until(12)
    assert most == 4


async def test_a_cancelled_worker_gives_its_inputs_back(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    started = Collector()

    async def hang(group: m.Message) -> None:
        await started(group)
        await asyncio.Event().wait()

    for index in range(3):
        await coordinator.publish(prompt_group(index))
    first = tasks.start(rollout.work("rollout", hang, concurrency=8))
    await started.until(3)
    await tasks.cancel(first)
    collected = Collector()
    tasks.start((await broker.client("rollout")).work("rollout", collected))
    await collected.until(3)


async def test_retryable_comes_again(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    tries = Collector()
    done = Collector()

    async def handle(group: m.Message) -> None:
        await tries(group)
        if len(tries.ids) < 3:
            raise Retryable("not yet", delay_s=0.05)
        await done(group)

    await coordinator.publish(prompt_group(0))
    tasks.start(rollout.work("rollout", handle))
    await done.until(1)
    assert len(tries.ids) >= 3


async def test_rejected_publishes_the_failure_once_and_for_all(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    failures: list[m.Message] = []
    collected = Collector()

    async def handle(group: m.Message) -> None:
        raise Rejected("prompt_too_long", "9 tokens, 4 allowed")

    async def collect(message: m.Message) -> None:
        failures.append(message)
        await collected(message)

    def on_rejected(group: m.Message, rejected: Rejected) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        return group_failed(group, rejected.kind)

    await coordinator.publish(prompt_group(0))
    tasks.start(rollout.work("rollout", handle, on_rejected=on_rejected))
    tasks.start(coordinator.work("coordinator", collect))
    await collected.until(1)
    assert isinstance(failures[0], m.GroupFailed)
    assert failures[0].kind == "prompt_too_long"


async def test_any_other_error_leaves_work(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")

    async def handle(group: m.Message) -> None:
        raise KeyError("a defect")

    await coordinator.publish(prompt_group(0))
    with pytest.raises(KeyError, match="a defect"):
        async with deadline(5, "work to end"):
            await rollout.work("rollout", handle, concurrency=4)


async def test_a_closed_gate_leaves_inputs_to_others(broker: Broker, tasks: Tasks) -> None:
    coordinator = await broker.client("coordinator")
    gated, free = await broker.client("rollout"), await broker.client("rollout")
    is_open = asyncio.Event()
    is_open.set()
    by_gated, by_free = Collector(), Collector()

    async def gate() -> None:
        await is_open.wait()

    tasks.start(gated.work("rollout", by_gated, concurrency=8, gate=gate))
    await coordinator.publish(prompt_group(0))
    await by_gated.until(1)
    is_open.clear()
    seen = len(by_gated.ids)
    for index in range(1, 6):
        await coordinator.publish(prompt_group(index))
    tasks.start(free.work("rollout", by_free, concurrency=8))
    await by_free.until(5)
    assert set(by_gated.ids[seen:]) <= {"group-0"}
    is_open.set()
    await tasks.cancel(tasks.running[1])
    await coordinator.publish(prompt_group(6))
    await by_gated.until(2)


async def test_a_late_joiner_gets_the_last_value_and_then_newer_ones_in_order(broker: Broker, tasks: Tasks) -> None:
    coordinator, trainer = await broker.client("coordinator"), await broker.client("trainer")
    assert await trainer.last(m.Phase) is None
    for sequence in (1, 2, 3):
        await coordinator.publish(phase(sequence))
    assert await trainer.last(m.Phase) == phase(3)
    seen: list[int] = []
    first, all_of_them = asyncio.Event(), asyncio.Event()

    async def handle(message: m.Phase) -> None:
        seen.append(message.sequence)
        first.set()
        if message.sequence == 6:
            all_of_them.set()

    tasks.start(trainer.follow(m.Phase, handle))
    async with deadline(5, "the kept phase"):
        await first.wait()
    for sequence in (4, 5, 6):
        await coordinator.publish(phase(sequence))
    async with deadline(5, "phases up to 6"):
        await all_of_them.wait()
    assert seen[0] == 3
    assert seen == sorted(set(seen))


async def test_what_is_followed_goes_on_with_its_senders_trace(broker: Broker, tasks: Tasks) -> None:
    coordinator, trainer = await broker.client("coordinator"), await broker.client("trainer")
    seen: dict[int, int] = {}
    kept, newer = asyncio.Event(), asyncio.Event()

    async def handle(message: m.Phase) -> None:
        seen[message.sequence] = trace.get_current_span().get_span_context().trace_id
        (newer if message.sequence == 2 else kept).set()

    async def publish(sequence: int) -> None:
        sender = SpanContext(trace_id=sequence, span_id=1, is_remote=False)
        with trace.use_span(NonRecordingSpan(sender)):
            await coordinator.publish(phase(sequence))

    await publish(1)
    tasks.start(trainer.follow(m.Phase, handle))
    async with deadline(5, "the kept phase"):
        await kept.wait()
    await publish(2)
    async with deadline(5, "the next phase"):
        await newer.wait()
    assert seen == {1: 1, 2: 2}


async def test_plain_messages_reach_subscribers_by_wildcard(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    heard: list[m.Message] = []
    both = asyncio.Event()

    async def handle(message: m.Message) -> None:
        heard.append(message)
        if {h.worker for h in heard} >= {"rollout-0", "rollout-1"}:  # type: ignore[attr-defined]
            both.set()

    tasks.start(coordinator.subscribe(coordinator.subjects.heartbeat(), handle))
    async with deadline(5, "heartbeats of two workers"):
        while not both.is_set():
            for worker in ("rollout-0", "rollout-1"):
                await rollout.publish(heartbeat(worker))
            await asyncio.wait({asyncio.ensure_future(both.wait())}, timeout=0.05)


async def test_requests_are_answered_or_run_out(broker: Broker, tasks: Tasks) -> None:
    coordinator, cli = await broker.client("coordinator"), await broker.client("cli")

    async def answer(request: m.Message) -> m.Message:
        assert isinstance(request, m.StatusRequest)
        return status_reply()

    with pytest.raises(DeadlineExceeded, match="coordinator to answer StatusRequest"):
        await cli.request(m.StatusRequest(), deadline_s=0.2)
    tasks.start(coordinator.serve(answer))
    assert await cli.request(m.StatusRequest(), deadline_s=5) == status_reply()


async def test_the_journal_replays_in_order(broker: Broker, tasks: Tasks) -> None:
    coordinator = await broker.client("coordinator")
    assert [record async for record in coordinator.replay()] == []
    records = [f"record {index}".encode() for index in range(600)]
    for record in records:
        await coordinator.append(record)
    again = await broker.client("coordinator")
    assert [record async for record in again.replay()] == records


async def test_the_depth_of_a_queue_is_what_waits_and_what_is_held(broker: Broker, tasks: Tasks) -> None:
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    held, go, collected = asyncio.Event(), asyncio.Event(), Collector()

    async def handle(group: m.Message) -> None:
        held.set()
        await go.wait()
        await collected(group)

    for index in range(3):
        await coordinator.publish(prompt_group(index))
    depth = (await coordinator.queue_depths())["rollout"]
    assert (depth.pending, depth.unacked) == (3, 0)
    working = tasks.start(rollout.work("rollout", handle))
    async with deadline(10, "the first input"):
        await held.wait()
    depth = (await coordinator.queue_depths())["rollout"]
    assert depth.unacked >= 1 and depth.pending + depth.unacked in (3, 4)  # one may be there twice
    go.set()
    await collected.until(3)
    await tasks.cancel(working)
