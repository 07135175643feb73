"""Tracing of a process: not at all where nobody asked for it, and on disk by the time it is killed."""

import subprocess
import sys
import threading
from pathlib import Path

from opentelemetry import trace

from beamline.protocol.telemetry_config import TelemetrySection
from beamline.runtime.otlp_json import decode_line, plain
from beamline.runtime.telemetry import start_tracing
from beamline.runtime.trace_ids import RootIds

KILLED = """
import os, signal, sys, time
from pathlib import Path
from opentelemetry import trace
from beamline.protocol.telemetry_config import TelemetrySection
from beamline.runtime.telemetry import EXPORT_EVERY_MS, start_tracing
from beamline.runtime.trace_ids import RootIds, given_ids

start_tracing("reward", "reward-1", "sums", Path(sys.argv[1]), TelemetrySection())
tracer = trace.get_tracer("test")
with given_ids(RootIds.of("sums", 1)):
    root = tracer.start_span("step")
with trace.use_span(root):
    tracer.start_span("score group").end()
root.end()
time.sleep(3e-3 * EXPORT_EVERY_MS)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_started_where_nobody_wants_spans(tmp_path: Path):
    before = threading.active_count()
    start_tracing("reward", "reward", "sums", tmp_path, TelemetrySection(traces=False))
    assert threading.active_count() == before and list(tmp_path.iterdir()) == []
    assert not trace.get_tracer("test").start_span("score group").is_recording()


def test_a_process_that_is_killed_has_written_its_spans_with_the_ids_that_were_given(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=30)
    assert done.returncode == -9
    lines = (tmp_path / "traces" / "reward-1.jsonl").read_bytes().splitlines()
    (resource,) = (resource for line in lines for resource in decode_line(line).resource_spans)
    told = plain(resource.resource.attributes)
    assert (told["service.name"], told["service.instance.id"]) == ("beamline-reward", "reward-1")
    assert told["beamline.run"] == "sums"
    child, root = resource.scope_spans[0].spans
    ids = RootIds.of("sums", 1)
    assert (root.trace_id, root.span_id) == (f"{ids.trace_id:032x}", f"{ids.span_id:016x}")
    assert (child.trace_id, child.parent_span_id) == (root.trace_id, root.span_id) and child.span_id != root.span_id
