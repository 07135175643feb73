"""What is added to the steps in which something is on; and a subscriber of the benchmark at a real broker's bytes."""

import asyncio
from pathlib import Path

import pytest
from benchmarks.observers import BLOCK, Looked, Subscriber, is_looked_at
from benchmarks.telemetry import added, added_cpu, read_traced

from beamline.runtime.credentials import Credentials
from example_spans import write_example_traces


def test_a_machine_that_slows_down_adds_nothing():
    seconds = [1.0 + 0.01 * number for number in range(20)]
    found = added([seconds], [[number % 2 == 1 for number in range(20)]])
    assert found.share == pytest.approx(0, abs=1e-3) and found.low <= found.share <= found.high


def test_what_is_added_is_a_share_of_the_step_with_it():
    is_on = [False, False, True, True, False, False, True, True, False, False]
    seconds = [2.5 if on else 2.0 for on in is_on]
    seconds[2] = 9.0  # a hiccup of the machine
    found = added([seconds, seconds], [is_on, is_on])
    assert found.share == pytest.approx(0.2)


def test_steps_at_the_ends_have_nothing_to_be_compared_with():
    with pytest.raises(ValueError, match="more steps"):
        added([[1.0, 1.0, 1.0]], [[True, False, False]])


def test_traced_steps_are_those_that_left_a_root(tmp_path: Path):
    write_example_traces(tmp_path)
    lines = [f'{{"step":{step},"time":0,"values":{{"timing/step":{1.0 + step}}}}}\n' for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    traced = read_traced(tmp_path)
    assert traced.seconds == [3.0, 4.0] and traced.is_traced == [True, False]
    assert traced.spans_per_step == 18, "21 in step 1, 15 in step 2"


def test_processor_time_is_what_a_step_takes_more_when_it_is_looked_at():
    is_on, shares = [False, True, False, True, True], [0.01, 0.04, 0.02, 0.05, 0.05]
    looked = Looked(seconds=[1.0] * 5, is_looked_at=is_on, cpu_shares=shares, num_received=9, num_events=9)
    assert added_cpu(looked) == pytest.approx(0.035)


def test_observers_come_and_go_in_steps_that_do_not_count():
    changes = [number for number in range(1, 40) if is_looked_at(number) != is_looked_at(number - 1)]
    assert changes == list(range(BLOCK, 40, BLOCK)) and not is_looked_at(0)


def test_a_subscriber_logs_in_answers_pings_and_counts():
    written: list[bytes] = []

    class Wire(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.append(bytes(data))

    async def talk() -> Subscriber:
        subscriber = Subscriber(Credentials(url="nats://127.0.0.1:1", user="cli", password="p"), "beamline.r.metrics.*")
        subscriber.connection_made(Wire())
        subscriber.data_received(b'INFO {"version":"2"}\r\nPONG\r\n')
        subscriber.data_received(b"HMSG beamline.r.metrics.trainer 1 2 3\r\nx\r\nPING\r\n")
        return subscriber

    subscriber = asyncio.run(talk())
    assert b'"user": "cli"' in written[0] and b"SUB beamline.r.metrics.* 1\r\n" in written[0]
    assert written[1:] == [b"PONG\r\n"]
    assert subscriber.ready.is_set() and subscriber.num_received == 1
