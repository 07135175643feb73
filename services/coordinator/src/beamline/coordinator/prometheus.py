"""The run's numbers for Prometheus, at `telemetry.prometheus_port` of this host's loopback address."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from beamline.protocol.errors import ConfigError
from beamline.protocol.metric_schema import find, prometheus_name

HOST = "127.0.0.1"

type Latest = Callable[[], Mapping[str, float]]
"""The newest value of each metric; called from another thread."""


class RunCollector(Collector):
    """Makes families of the values when it is asked; names that the schema does not have are left out."""

    def __init__(self, latest: Latest) -> None:
        self._latest = latest

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family a row of the schema that has values."""
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in sorted(self._latest().items()):
            metric = find(name)
            if metric is None:
                continue
            called = prometheus_name(metric)
            if called not in families:
                meaning = f"{metric.name}: {metric.meaning} ({metric.unit}, {metric.kind}, by {metric.owner})"
                families[called] = GaugeMetricFamily(called, meaning, labels=metric.labels)
            families[called].add_metric(list((metric.match(name) or {}).values()), value)
        yield from families.values()


def serve_prometheus(port: int, latest: Latest) -> Callable[[], None]:
    """Serve from a thread of its own. Returns what ends it.

    Raises:
        ConfigError: the port is taken.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(latest))
    try:
        server, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise ConfigError(
            f"telemetry.prometheus_port={port} cannot be had: {error.strerror}; end what uses it, or take another port "
            "(0 serves no metrics)"
        ) from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close
