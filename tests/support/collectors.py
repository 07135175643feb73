"""Collectors on loopback that keep what they receive: OTLP over gRPC and HTTP, decoded by OpenTelemetry's protobufs."""

import gzip
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass
class Received:
    """By a collector."""

    endpoint: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def spans(self) -> dict[str, str]:
        """Names by span id."""
        return {
            span.span_id.hex(): span.name
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def services(self) -> set[str]:
        return {
            attribute.value.string_value
            for request in self.requests
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }


@contextmanager
def grpc_collector() -> Iterator[Received]:
    received = Received()

    class Servicer(TraceServiceServicer):
        def Export(self, request, context):
            received.requests.append(request)
            received.headers.append(dict(context.invocation_metadata()))
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(grace=None).wait()


@contextmanager
def http_collector() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                received.requests.append(ExportTraceServiceRequest.FromString(body))
                received.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
