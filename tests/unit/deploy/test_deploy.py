"""deploy/ names no metric that there is not, listens on loopback alone, and holds together."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from beamline.protocol.metric_schema import METRICS, prometheus_name
from promql import names_in
from sources import ROOT

DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
KNOWN = {prometheus_name(metric): {*metric.labels} for metric in METRICS}
TARGET = {"run", "job", "instance"}
"""Labels that the scrape configuration gives to everything of a target."""
PROMETHEUS_OWN = {"up"}
LISTENING = re.compile(r"(?<![\w.])((?:[0-9]{1,3}\.){3}[0-9]{1,3}|localhost|\[::\]|\[::1\]):([0-9]{2,5})(?![\w.])")


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression of a dashboard or rule, with where it stands."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            yield from ((f"{path.name}: {panel['title']}", t["expr"]) for t in panel.get("targets", []) if "expr" in t)
        for variable in dashboard["templating"]["list"]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            yield f"{path.name}: {variable['name']}", f'{metric}{{{label}=""}}'
    for group in read("prometheus/alerts.yaml")["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


def test_what_is_made_from_the_schema_is_up_to_date():
    made = subprocess.run(
        [sys.executable, str(DEPLOY / "make"), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(("where", "expression"), [*expressions()])
def test_every_metric_and_label_exists(where: str, expression: str):
    found = names_in(expression.replace("$run", "a"))
    assert found.metrics, where
    assert found.metrics <= KNOWN.keys() | PROMETHEUS_OWN, where
    labels = TARGET.union(*(KNOWN.get(metric, set()) for metric in found.metrics))
    assert found.labels <= labels, where


def test_legends_and_texts_name_labels_that_exist():
    panels = [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]
    for target in (target for panel in panels for target in panel.get("targets", []) if "expr" in target):
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert all(named == KNOWN[metric] for metric in names_in(target["expr"]).metrics), target
    for rule in read("prometheus/alerts.yaml")["groups"][0]["rules"]:
        known = TARGET.union(*(KNOWN.get(metric, set()) for metric in names_in(rule["expr"]).metrics))
        named = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
        assert named <= known, rule["alert"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_what_grafanas_models_read(path: Path):
    """A field that Grafana does not have would be lost on the way, one of the wrong kind refused."""
    register_default_plugins()
    content = json.loads(path.read_text())
    assert json.loads(JSONEncoder().encode(Dashboard.from_json(content))) == content
    sources = {source["uid"]: source["type"] for source in read("grafana/datasources.yaml")["datasources"]}
    for used in re.findall(r'"datasource": (\{[^}]*\})', path.read_text()):
        assert sources[json.loads(used)["uid"]] == json.loads(used)["type"]


def test_the_compose_file_fits_its_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run(
        [*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_images_are_pinned_and_what_is_mounted_exists():
    compose = read("compose.yaml")
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[\w./-]+:v?[0-9]+\.[0-9]+\.[0-9]+", service["image"]), name
        for source, target, *_ in (volume.split(":") for volume in service["volumes"]):
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], source
            assert target.startswith("/")


def test_there_is_no_default_password():
    compose = read("compose.yaml")
    grafana = compose["services"]["grafana"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    assert compose["secrets"]["grafana_password"]["file"].startswith("${GRAFANA_PASSWORD_FILE:?")
    assert "GF_SECURITY_ADMIN_PASSWORD" not in grafana["environment"]


def test_everything_listens_on_loopback():
    compose = read("compose.yaml")
    assert all(service["network_mode"] == "host" and "ports" not in service for service in compose["services"].values())
    for name in ("compose.yaml", "collector.yaml", "tempo.yaml", "jaeger.yaml", "prometheus/targets/runs.yaml"):
        hosts = {host for host, _ in LISTENING.findall((DEPLOY / name).read_text())}
        assert hosts == {"127.0.0.1"}, name
    tempo = read("tempo.yaml")
    assert tempo["server"]["http_listen_address"] == tempo["server"]["grpc_listen_address"] == "127.0.0.1"
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def ends(config: Any, *path: str) -> str:
    """An endpoint of a configuration."""
    for part in path:
        config = config[part]
    return config


def test_each_finds_the_next():
    collector, tempo, jaeger = read("collector.yaml"), read("tempo.yaml"), read("jaeger.yaml")
    otlp = ("receivers", "otlp", "protocols", "grpc", "endpoint")
    assert ends(collector, *otlp) == "127.0.0.1:4317", "as telemetry.otlp_endpoint has it in the documents"
    sent_to = collector["exporters"]["otlp"]["endpoint"]
    assert ends(tempo, "distributor", *otlp) == ends(jaeger, *otlp) == sent_to
    urls = {source["type"]: source["url"] for source in read("grafana/datasources.yaml")["datasources"]}
    command = read("compose.yaml")["services"]["prometheus"]["command"]
    assert f"--web.listen-address={urls['prometheus'].removeprefix('http://')}" in command
    assert urls["tempo"] == f"http://127.0.0.1:{tempo['server']['http_listen_port']}"
    assert urls["jaeger"] == f"http://{jaeger['extensions']['jaeger_query']['http']['endpoint']}"


@pytest.mark.parametrize("name", ["collector.yaml", "jaeger.yaml"])
def test_a_pipelines_parts_are_configured(name: str):
    config = read(name)
    assert set(config["service"]["extensions"]) == config["extensions"].keys()
    for kind in ("receivers", "processors", "exporters"):
        used = {part for pipeline in config["service"]["pipelines"].values() for part in pipeline[kind]}
        assert used == config[kind].keys()


@pytest.mark.parametrize("name", ["alerts", "prometheus", "targets"])
def test_prometheus_files_fit_a_schema(name: str):
    schemas = json.loads((Path(__file__).parent / "prometheus.schema.json").read_text())
    file = {"targets": "targets/runs"}.get(name, name)
    validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schemas["$defs"]})
    assert [error.message for error in validator.iter_errors(read(f"prometheus/{file}.yaml"))] == []


def test_every_alert_has_a_unit_test():
    tested = {
        test["alertname"] for group in read("prometheus/alerts_test.yaml")["tests"] for test in group["alert_rule_test"]
    }
    assert tested == {rule["alert"] for rule in read("prometheus/alerts.yaml")["groups"][0]["rules"]}
