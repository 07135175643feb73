"""Tracing of a service process: to a file in the run's folder, to an OpenTelemetry collector, to both or not at all."""

import logging
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from beamline.protocol.telemetry_config import TelemetrySection
from beamline.runtime.collector import Collector
from beamline.runtime.span_file import SpanFile
from beamline.runtime.trace_ids import GivenIds

EXPORT_EVERY_MS = 500
"""What a process that is killed loses at most."""
MAX_QUEUE = 8192
"""Spans that wait to be exported; beyond these the oldest are dropped."""
MAX_LINKS = 4096
"""Of one span: a train batch refers to each of its groups."""

logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # `Collector` says it once, and shorter
logging.getLogger("opentelemetry.sdk").setLevel(logging.WARNING)  # a span that ends after the last export is no news


def start_tracing(service: str, worker: str, run: str, run_dir: Path, config: TelemetrySection) -> None:
    """Make this process's spans real, if anybody wants them. Once a process; `stop_tracing` exports the last ones."""
    exporters: list[SpanExporter] = []
    if config.traces:
        exporters.append(SpanFile(run_dir / "traces" / f"{worker}.jsonl"))
    if config.otlp_endpoint:
        exporters.append(Collector(config.otlp_endpoint, config.otlp_protocol, config.otlp_headers))
    if not exporters:
        return
    resource = Resource.create(
        {"service.name": f"beamline-{service}", "service.instance.id": worker, "beamline.run": run}
    )
    provider = TracerProvider(
        resource=resource, id_generator=GivenIds(), span_limits=SpanLimits(max_links=MAX_LINKS), shutdown_on_exit=False
    )
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUE, schedule_delay_millis=EXPORT_EVERY_MS)
        )
    trace.set_tracer_provider(provider)


def stop_tracing() -> None:
    """Export what is left, within seconds even where a collector does not answer; spans that end later are lost."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()
