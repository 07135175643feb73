"""Lines of OTLP/JSON beside OpenTelemetry's own encoding, and a file that outlives the process that wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from beamline.protocol.errors import ConfigError
from beamline.runtime.otlp_json import decode_line, encode_line, plain
from beamline.runtime.span_file import SpanFile

RESOURCE = Resource({"service.name": "beamline-trainer", "service.instance.id": "trainer", "process.pid": 7})


@pytest.fixture
def spans() -> list[ReadableSpan]:
    """A root, a child with a link and attributes of every type, and one that failed."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests", "1.0")
    with tracer.start_as_current_span("train step") as root:
        link = trace.Link(root.get_span_context(), {"beamline.group_id": "g-000001"})
        attributes = {"text": "ä", "yes": True, "count": 2**40, "share": 0.25, "many": [1, 2]}
        with tracer.start_as_current_span("assemble", links=[link], attributes=attributes):
            pass
        with (
            pytest.raises(ValueError, match="gone"),
            tracer.start_as_current_span("export", kind=trace.SpanKind.CONSUMER),
        ):
            raise ValueError("a blob is gone")
    return list(exporter.get_finished_spans())


def library_encoding(spans: list[ReadableSpan]) -> dict[str, Any]:
    """With ids in hexadecimal, which OTLP/JSON wants instead of protobuf's base64."""
    request = encode_spans(spans)
    found = MessageToDict(request)
    for scope, own in zip(found["resourceSpans"][0]["scopeSpans"], request.resource_spans[0].scope_spans, strict=True):
        for line, span in zip(scope["spans"], own.spans, strict=True):
            line.pop("flags", None)
            line |= {"traceId": span.trace_id.hex(), "spanId": span.span_id.hex()}
            if span.parent_span_id:
                line["parentSpanId"] = span.parent_span_id.hex()
            for link, of in zip(line.get("links", []), span.links, strict=True):
                link.pop("flags", None)
                link |= {"traceId": of.trace_id.hex(), "spanId": of.span_id.hex()}
    return found


def without_kinds(found: dict[str, Any]) -> dict[str, Any]:
    """Enumerations are numbers or names: both are OTLP/JSON."""
    numbers = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_CONSUMER": 5, "STATUS_CODE_ERROR": 2}
    return json.loads(json.dumps(found), object_hook=lambda d: {k: numbers.get(str(v), v) for k, v in d.items()})


def test_a_line_is_what_the_library_would_send(spans: list[ReadableSpan]):
    line = json.loads(encode_line(RESOURCE, spans))
    expected = without_kinds(library_encoding(spans))
    for resource in (*line["resourceSpans"], *expected["resourceSpans"]):
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                if not span.get("status"):
                    span.pop("status", None)
    assert line == expected


def test_a_line_comes_back(spans: list[ReadableSpan]):
    (resource,) = decode_line(encode_line(RESOURCE, spans)).resource_spans
    lines = {line.name: line for scope in resource.scope_spans for line in scope.spans}
    assert plain(resource.resource.attributes)["process.pid"] == 7
    assert plain(lines["assemble"].attributes) == {"text": "ä", "yes": True, "count": 2**40, "share": 0.25}
    assert plain(lines["assemble"].links[0].attributes) == {"beamline.group_id": "g-000001"}
    assert lines["export"].status.code == 2 and "a blob is gone" in lines["export"].status.message


def test_a_file_with_half_a_line_is_gone_on_with(tmp_path: Path, spans: list[ReadableSpan]):
    path = tmp_path / "traces" / "trainer.jsonl"
    first = SpanFile(path)
    assert first.export(spans) is SpanExportResult.SUCCESS
    first.shutdown()
    path.write_bytes(path.read_bytes() + b'{"resourceSpans":[{"res')
    second = SpanFile(path)
    second.export(spans[:1])
    second.shutdown()
    whole, half, last = path.read_bytes().splitlines()
    assert decode_line(whole) and half.endswith(b"res") and decode_line(last)


def test_a_full_disk_loses_spans_and_says_so_once(
    tmp_path: Path, spans: list[ReadableSpan], caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "trainer.jsonl"
    path.symlink_to("/dev/full")
    file = SpanFile(path)
    assert [file.export(spans) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
    file.shutdown()
    (line,) = caplog.messages
    assert str(path) in line and "No space left on device" in line


def test_a_file_that_cannot_be_made_is_a_setting_to_change(tmp_path: Path):
    (tmp_path / "traces").write_text("in the way")
    with pytest.raises(ConfigError, match=r"telemetry\.traces=false"):
        SpanFile(tmp_path / "traces" / "trainer.jsonl")
