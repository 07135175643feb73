"""Tracing of a service process: its spans have identities that travel in message headers, exported or not."""

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider


def start_tracing(service: str, worker: str) -> None:
    """Make this process's spans real. Once a process; an exporter may be added to the provider."""
    resource = Resource.create({"service.name": f"beamline-{service}", "service.instance.id": worker})
    trace.set_tracer_provider(TracerProvider(resource=resource))
