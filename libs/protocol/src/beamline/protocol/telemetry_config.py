"""What a run tells of itself, and to whom: `telemetry.*` of the run configuration."""

from typing import Annotated

import msgspec
from msgspec import Meta

from beamline.protocol.section import NonNegative, PositiveFloat, Section, check_choice

OTLP_PROTOCOLS = ("grpc", "http")


class TelemetrySection(Section, kw_only=True):
    """Traces, live gauges and what a silent worker brings about."""

    traces: bool = True
    """Write every service's spans to `<run folder>/traces/<worker>.jsonl`."""
    otlp_endpoint: str = ""
    """Send the spans to an OpenTelemetry collector too, such as http://127.0.0.1:4317; empty sends none."""
    otlp_protocol: str = "grpc"
    """grpc (port 4317 as a rule) or http (4318; without a path, `/v1/traces` is added)."""
    otlp_headers: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Sent along, as a collector's login needs them."""
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The coordinator serves all metrics at http://127.0.0.1:PORT/metrics; 0 does not."""
    kept_groups: NonNegative = 4
    """Groups of each step whose completions are written down with their rewards, to be looked at."""
    silent_s: PositiveFloat = 30.0
    """A worker without a heartbeat for this long is named, and asked to write all its stacks to its log."""

    def __post_init__(self) -> None:
        check_choice("otlp_protocol", self.otlp_protocol, OTLP_PROTOCOLS)
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint={self.otlp_endpoint!r}: give a URL, such as http://127.0.0.1:4317")
