"""Spans to an OpenTelemetry collector, which may be away: that is said once, and nothing ever waits for it for long."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

TIMEOUT_S = 2.0
"""Of one batch; a service that ends waits so long for a collector that does not answer."""
PAUSE_S = 10.0
"""Without a try, after a batch that was not taken."""

log = logging.getLogger(__name__)


class Collector(SpanExporter):
    """OTLP over gRPC or HTTP. What the collector does not take is lost to it.

    The connection is made with the first batch, for gRPC takes a moment to import. A process that was forked off, as
    vLLM's engine is, sends nothing: gRPC does not survive a fork. The file has its spans.
    """

    def __init__(
        self,
        endpoint: str,
        protocol: str,
        headers: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._protocol = protocol
        self._headers = headers
        self._now = now
        self._pid = os.getpid()
        self._exporter: SpanExporter | None = None
        self._not_before = 0.0
        self._is_said = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._now() < self._not_before or os.getpid() != self._pid:
            return SpanExportResult.FAILURE
        if self._exporter is None:
            self._exporter = _connect(self._endpoint, self._protocol, self._headers)
        result = self._exporter.export(spans)
        if result is SpanExportResult.FAILURE:
            self._not_before = self._now() + PAUSE_S
            self._say()
        return result

    def shutdown(self) -> None:
        if self._exporter is not None:
            self._exporter.shutdown()

    def _say(self) -> None:
        if not self._is_said:
            self._is_said = True
            log.warning(
                "no collector takes spans at %s (telemetry.otlp_endpoint, %s): the run goes on, and it is tried again "
                "every %g s without a further word",
                *(self._endpoint, self._protocol, PAUSE_S),
            )


def _connect(endpoint: str, protocol: str, headers: Mapping[str, str]) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, headers=dict(headers), timeout=TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    has_path = urlsplit(endpoint).path not in ("", "/")
    url = endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces"
    return HttpExporter(url, headers=dict(headers), timeout=TIMEOUT_S)
