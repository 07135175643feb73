"""What only a real broker can show: deaths, restarts, refusals and what is on the wire."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from beamline.protocol import messages as m
from beamline.protocol.errors import BusUnavailable, ConfigError, DeadlineExceeded, PermissionDenied, Rejected
from beamline.runtime.credentials import Credentials, credentials_path
from beamline.runtime.deadline import deadline
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.trace_context import trace_headers
from brokers import ACK_WAIT_S, SUBJECTS, Collector, NatsBroker, Tasks
from bus_messages import group_failed, phase, prompt_group
from wire_examples import MESSAGES

HANGING_WORKER = Path(__file__).parents[1] / "support" / "hanging_worker.py"


async def start_hanging_worker(run_dir: Path) -> asyncio.subprocess.Process:
    """A worker process that holds one input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HANGING_WORKER), str(run_dir), str(ACK_WAIT_S), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with deadline(20, "the worker to take its input"):
        assert await process.stdout.readline()
    return process


async def test_an_input_of_a_killed_worker_goes_to_another(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator, rollout = await nats.client("coordinator"), await nats.client("rollout")
    await coordinator.publish(prompt_group(0))
    doomed = await start_hanging_worker(nats.server.run_dir)
    collected = Collector()
    tasks.start(rollout.work("rollout", collected))
    await asyncio.sleep(2 * ACK_WAIT_S)
    assert collected.ids == [], "in-progress acks hold the input while its worker lives"
    doomed.kill()
    await doomed.communicate()
    await collected.until(1)


async def test_a_slow_handler_keeps_its_input(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    collected = Collector()

    async def slow(group: m.Message) -> None:
        await asyncio.sleep(3 * ACK_WAIT_S)
        await collected(group)

    for _ in range(2):
        tasks.start((await nats.client("rollout")).work("rollout", slow))
    await coordinator.publish(prompt_group(0))
    await collected.until(1)
    await asyncio.sleep(2 * ACK_WAIT_S)
    assert collected.ids == ["group-0"]


async def test_an_ack_wait_that_runs_out_does_not_call_a_running_handler_twice(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator, rollout = await nats.client("coordinator"), await nats.client("rollout")
    running, most = 0, 0
    collected = Collector()

    async def handle(group: m.Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(2.5 * ACK_WAIT_S)
        running -= 1
        await collected(group)

    await coordinator.publish(prompt_group(0))
    working = tasks.start(rollout.work("rollout", handle, concurrency=4))
    holding = rollout.connection.send

    async def drop_in_progress(subject: str, payload: bytes, *rest: object, **named: object) -> None:
        if payload != b"+WPI":
            await holding(subject, payload, *rest, **named)  # type: ignore[arg-type]

    rollout.connection.send = drop_in_progress  # type: ignore[method-assign, assignment]
    await collected.until(1)
    assert most == 1
    await tasks.cancel(working)


async def test_a_gate_that_opens_just_after_its_inputs_came_loses_none(nats: NatsBroker, tasks: Tasks) -> None:
    """A lost input would come again only after its ack wait, which is longer here than the deadline."""
    rollout = await nats.client("rollout")
    coordinator = await NatsBus.connect(nats.server.credentials("coordinator"), SUBJECTS, ack_wait_s=60)
    nats.clients.append(coordinator)
    await coordinator.ensure_streams()
    is_open, collected = asyncio.Event(), Collector()

    async def gate() -> None:
        await is_open.wait()

    is_open.set()
    tasks.start(rollout.work("rollout", collected, concurrency=16, gate=gate))
    for index in range(0, 600, 3):
        is_open.clear()
        for group in range(index, index + 3):
            await coordinator.publish(prompt_group(group))
        is_open.set()
        await collected.until(index + 3)


async def test_an_input_that_keeps_killing_its_worker_is_rejected(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator = await nats.client("coordinator")
    rollout = await nats.client("rollout", max_deliveries=2)
    failures: list[str] = []
    collected = Collector()

    async def crash(group: m.Message) -> None:
        raise OSError("the engine died")

    def on_rejected(group: m.Message, rejected: Rejected) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        failures.append(rejected.kind)
        return group_failed(group, rejected.kind)

    await coordinator.publish(prompt_group(0))
    tasks.start(coordinator.work("coordinator", collected))
    for _ in range(2):
        with pytest.raises(OSError, match="engine died"):
            await rollout.work("rollout", crash, on_rejected=on_rejected)
    tasks.start(rollout.work("rollout", crash, on_rejected=on_rejected))
    await collected.until(1)
    assert failures == ["redelivered"]


async def test_a_malformed_input_is_dropped_and_the_next_one_served(
    nats: NatsBroker, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, rollout = await nats.client("coordinator"), await nats.client("rollout")
    await coordinator.connection.jetstream.publish(f"{SUBJECTS.root}.work.rollout.train", b"\x81\xa4type\xa3Odd")
    await coordinator.publish(prompt_group(0))
    collected = Collector()
    tasks.start(rollout.work("rollout", collected))
    await collected.until(1)
    assert "unknown message type 'Odd'" in caplog.text
    stream = await coordinator.connection.jetstream.stream_info(SUBJECTS.stream("work"))
    async with deadline(5, "the queue to be empty"):
        while stream.state.messages:
            await asyncio.sleep(0.02)
            stream = await coordinator.connection.jetstream.stream_info(SUBJECTS.stream("work"))


HOSTILE = (b"cos\nsystem\n(S'touch /dev/null'\ntR.", b"\x80\x05", b"\xdf\xff\xff\xff\xff", b"\x91" * 4096, b"")
"""Pickles, a map of four billion entries, a nest, nothing."""


async def test_hostile_bytes_on_the_subjects_of_a_policy_are_refused(
    nats: NatsBroker, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    """From whoever may publish there; everybody else is turned away by the broker."""
    senders = {
        SUBJECTS.policy: ("trainer", m.PolicyUpdate),
        SUBJECTS.fence: ("coordinator", m.Fence),
        f"{SUBJECTS.root}.work.coordinator": ("rollout", None),
    }
    follower = await nats.client("coordinator")
    for subject, (service, kind) in senders.items():
        heard, caught = asyncio.Event(), []

        async def take(message: m.Message, heard: asyncio.Event = heard, caught: list[m.Message] = caught) -> None:
            caught.append(message)
            heard.set()

        following = follower.follow(kind, take) if kind else follower.work("coordinator", take)
        task = tasks.start(following)
        sender = await nats.client(service)
        caplog.clear()
        for payload in HOSTILE:
            await sender.connection.jetstream.publish(subject, payload)
        good = next(one for one in MESSAGES if type(one) is (kind or m.PolicyPrepared))
        await sender.publish(good)
        async with deadline(5, f"{type(good).__name__} after what is hostile"):
            await heard.wait()
        assert caught == [good] and "dropped" in caplog.text
        task.cancel()


async def test_a_killed_server_comes_back_with_what_it_stored(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator, rollout = await nats.client("coordinator"), await nats.client("rollout")
    collected, phases = Collector(), []
    newest = asyncio.Event()

    async def follow(message: m.Phase) -> None:
        phases.append(message.sequence)
        if message.sequence == 2:
            newest.set()

    async def answer(group: m.Message) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        return group_failed(group)

    tasks.start(coordinator.work("coordinator", collected, concurrency=4))
    tasks.start(rollout.follow(m.Phase, follow))
    await coordinator.publish(phase(1))
    for index in range(20):
        await coordinator.publish(prompt_group(index))
    os.kill(nats.server.pid, signal.SIGKILL)
    async with deadline(5, "the server's death to be noticed"):
        assert "exit code -9" in str(await nats.server.died())
    late = [asyncio.create_task(coordinator.publish(prompt_group(index))) for index in range(20, 25)]
    tasks.start(rollout.work("rollout", answer, concurrency=4))
    await nats.server.restart()
    await asyncio.gather(*late)
    await coordinator.publish(phase(2))
    await collected.until(25)
    async with deadline(5, "the phase after the restart"):
        await newest.wait()
    assert phases in ([1, 2], [2])


async def test_workers_may_start_before_the_streams_exist(tmp_path: Path, tasks: Tasks) -> None:
    server = NatsServer(tmp_path, SUBJECTS)
    await server.start()
    broker = NatsBroker(server)
    coordinator, rollout = await broker.client("coordinator"), await broker.client("rollout")
    collected, phases = Collector(), asyncio.Event()

    async def follow(_: m.Phase) -> None:
        phases.set()

    tasks.start(rollout.work("rollout", collected))
    tasks.start(rollout.follow(m.Phase, follow))
    early = tasks.start(coordinator.publish(prompt_group(0)))
    await asyncio.sleep(0.3)
    assert not early.done()
    await coordinator.ensure_streams()
    await coordinator.publish(phase(1))
    await collected.until(1)
    async with deadline(5, "the first phase"):
        await phases.wait()
    await tasks.cancel()
    await broker.close()


async def test_a_publish_gives_up_at_its_deadline(nats: NatsBroker) -> None:
    coordinator = await nats.client("coordinator", publish_deadline_s=0.5)
    await nats.server.stop()
    with pytest.raises(DeadlineExceeded, match=r"PromptGroup to be stored on .*disconnected"):
        await coordinator.publish(prompt_group(0))
    await nats.server.start()


async def test_services_cannot_use_each_others_subjects(nats: NatsBroker) -> None:
    reward, rollout, cli = await nats.client("reward"), await nats.client("rollout"), await nats.client("cli")
    with pytest.raises(PermissionDenied, match=r"'reward' .* publish to .beamline\.test\.phase"):
        await reward.publish(phase(1))
    for kind, subject in ((m.PolicyUpdate, "policy"), (m.Fence, "fence")):
        with pytest.raises(PermissionDenied, match=rf"'reward' .* publish to .beamline\.test\.{subject}"):
            await reward.publish(next(one for one in MESSAGES if isinstance(one, kind)))
    with pytest.raises(PermissionDenied, match=r"'cli' .* publish to .beamline\.test\.work\.rollout"):
        await cli.publish(prompt_group(0))
    with pytest.raises(PermissionDenied, match=r"'rollout' .* publish to .beamline\.test\.control"):
        await rollout.request(m.StopRequest())
    with pytest.raises(PermissionDenied, match=r"subscription to ._inbox\.coordinator"):
        await (await rollout.connection.subscribe("_INBOX.coordinator.>")).next()
    with pytest.raises(PermissionDenied, match=r"(?i)CONSUMER\.MSG\.NEXT\.beamline-test-work\.trainer"):
        await rollout.work("trainer", Collector())
    with pytest.raises(PermissionDenied, match=r"(?i)STREAM\.CREATE"):
        await rollout.ensure_streams()


async def test_a_wrong_password_and_a_wrong_address_are_plain_errors(nats: NatsBroker) -> None:
    wrong = Credentials(url=nats.server.url, user="rollout", password="guess")
    with pytest.raises(BusUnavailable, match="turned user 'rollout' away"):
        await NatsBus.connect(wrong, SUBJECTS)
    with pytest.raises(BusUnavailable, match=r"no nats-server at nats://127\.0\.0\.1:9 "):
        await NatsBus.connect(Credentials(url="nats://127.0.0.1:9"), SUBJECTS, connect_deadline_s=0.5)


async def test_a_taken_port_is_a_plain_error(nats: NatsBroker, tmp_path: Path) -> None:
    second = NatsServer(tmp_path / "second", SUBJECTS, port=nats.server.port)
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{nats.server.port}, the port is taken"):
        await second.start()


async def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in the way")
    with pytest.raises(BusUnavailable, match=r"(?s)nats-server ended with exit code 1.*JetStream: storage directory"):
        await NatsServer(tmp_path, SUBJECTS).start()


async def test_credentials_are_private(nats: NatsBroker) -> None:
    for service in ("coordinator", "cli"):
        path = credentials_path(nats.server.run_dir, service)
        assert path.stat().st_mode & 0o777 == 0o600
    assert (nats.server.run_dir / "nats" / "server.conf").stat().st_mode & 0o777 == 0o600
    assert nats.server.credentials("cli").password not in repr(nats.server.credentials("cli"))


async def test_one_trace_follows_a_group(nats: NatsBroker, tasks: Tasks) -> None:
    coordinator, rollout = await nats.client("coordinator"), await nats.client("rollout")
    trace.set_tracer_provider(TracerProvider())
    seen: list[int] = []
    collected = Collector()

    async def answer(group: m.Message) -> m.Message:
        assert isinstance(group, m.PromptGroup)
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return group_failed(group)

    async def collect(message: m.Message) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        await collected(message)

    tasks.start(rollout.work("rollout", answer))
    tasks.start(coordinator.work("coordinator", collect))
    with trace.get_tracer("test").start_as_current_span("issue") as span:
        assert "traceparent" in trace_headers()
        await coordinator.publish(prompt_group(0))
        issued = span.get_span_context().trace_id
    await collected.until(1)
    assert seen == [issued, issued]
