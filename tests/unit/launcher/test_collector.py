"""What a user hears of the collector before the services start."""

import asyncio
import socket
from contextlib import closing

import pytest

from beamline.coordinator.launch.collector import say_if_away


@pytest.fixture
def lines() -> list[str]:
    return []


def test_a_collector_that_answers_is_not_mentioned_nor_is_none(lines: list[str]):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        asyncio.run(say_if_away(f"http://127.0.0.1:{server.getsockname()[1]}", lines.append))
    asyncio.run(say_if_away("", lines.append))
    assert lines == []


def test_one_that_is_away_is_said_with_its_address_and_what_to_do(lines: list[str]):
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}/v1/traces"
        asyncio.run(say_if_away(endpoint, lines.append))
    (line,) = lines
    assert endpoint in line and "nobody listens there" in line and "telemetry.otlp_endpoint" in line


def test_an_address_without_a_host_is_said_too(lines: list[str]):
    asyncio.run(say_if_away("http://127.0.0.1:99999", lines.append))
    assert "range" in lines[0]
