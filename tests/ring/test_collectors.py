"""Traces of a whole run at a collector: by gRPC, by HTTP, and what becomes of the run where none answers."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from beamline.coordinator.observe.spans import read_spans
from collectors import grpc_collector, http_collector

SUPPORT = Path(__file__).parents[1] / "support"
RUN_DEADLINE_S = 60.0


def run_ring(run_dir: Path, endpoint: str, protocol: str) -> str:
    """A whole run; returns what it logged."""
    command = [sys.executable, SUPPORT / "traced_ring.py", run_dir, "calm", "--endpoint", endpoint]
    done = subprocess.run(
        [*command, "--protocol", protocol], check=True, timeout=RUN_DEADLINE_S, cwd=SUPPORT, capture_output=True
    )
    return done.stderr.decode()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which connections are refused."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def mute() -> Iterator[str]:
    """An address at which connections are taken and nothing is ever answered."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("protocol", "collector"), [("grpc", grpc_collector), ("http", http_collector)])
def test_a_collector_receives_every_span(tmp_path: Path, protocol: str, collector):
    with collector() as received:
        said = run_ring(tmp_path, received.endpoint, protocol)
    written = {span.span_id: span.name for span in read_spans(tmp_path)}
    assert len(written) > 500 and received.spans() == written
    assert received.services() == {"beamline-ring"}
    assert all(headers["x-team"] == "sums" for headers in received.headers), "telemetry.otlp_headers are sent along"
    assert "no collector" not in said


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("away", ["nobody", "mute"])
def test_a_collector_that_is_away_is_said_once_and_the_run_goes_on(
    tmp_path: Path, protocol: str, away: str, request: pytest.FixtureRequest
):
    endpoint = request.getfixturevalue(away)
    said = run_ring(tmp_path, endpoint, protocol)
    assert said.count("no collector takes spans at") == 1 and endpoint in said
    assert "Traceback" not in said and "Failed to export" not in said and "Transient" not in said
    assert len(list(read_spans(tmp_path))) > 500, "the file has them all"
    seconds_to_stop = float(said.rpartition("stopped within ")[2].split()[0])
    assert seconds_to_stop < 4.0
