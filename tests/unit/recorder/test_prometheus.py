"""The endpoint: text that Prometheus' own parser accepts, with the run's values under the schema's names."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from beamline.coordinator.launch.preflight import check_port
from beamline.coordinator.prometheus import serve_prometheus
from beamline.protocol.errors import ConfigError
from beamline.protocol.metric_schema import METRICS, find, prometheus_sample


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def every_metric() -> dict[str, float]:
    """A value for each row of the schema; two workers, and two data sources."""
    values: dict[str, float] = {}
    for number, metric in enumerate(METRICS):
        for word in ("one", 'a "b"\n') if metric.labels else ("",):
            name = metric.name.replace("<k>", "4")
            for label in metric.labels:
                name = name.replace(f"<{label}>", word)
            values[name] = number + 0.125 * len(values)
    return values


def test_what_is_served_is_what_is_known(free_port: int) -> None:
    values = every_metric()
    close = serve_prometheus(free_port, lambda: values | {"unheard/of": 1.0})
    try:
        for _ in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            families = {family.name: family for family in text_string_to_metric_families(text)}
            served = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in families.values()
                for sample in family.samples
            }
            named = {name: prometheus_sample(name) for name in values}
            expected = {
                (sample[0], tuple(sorted(sample[1].items()))): values[name] for name, sample in named.items() if sample
            }
            assert served == expected
            values["reward/mean"] = -3.5
    finally:
        close()
    assert len(families) == len(METRICS)
    assert {family.type for family in families.values()} == {"gauge"}
    loss, meaning = families["beamline_policy_loss"], find("policy/loss")
    assert meaning and meaning.meaning in loss.documentation and "trainer" in loss.documentation


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"telemetry\.prometheus_port={port} cannot be had: Address already"):
            serve_prometheus(port, dict)
        with pytest.raises(ConfigError, match=rf"telemetry\.prometheus_port={port} cannot be had: Address already"):
            check_port("telemetry.prometheus_port", port)
