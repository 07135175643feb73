"""A live run's numbers from outside: Prometheus while it goes on, and what every logger has written in the end."""

import asyncio
import json
import socket
import sys
import urllib.request
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from beamline.protocol.metric_schema import METRICS, prometheus_name
from beamline.runtime.deadline import deadline
from engineless_run import EnginelessRun
from logger_files import scalars, wandb_history

NUM_STEPS = 16
"""Some seconds: the coordinator's second heartbeat, the first that its own ears hear, comes after two."""
WORKERS = ("coordinator", "reward", "trainer", "rollout-0")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Value by name and worker; "" where a number is of the whole run."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    known = {prometheus_name(metric) for metric in METRICS}
    assert {family.name for family in families} <= known
    return {(s.name, s.labels.get("worker", "")): s.value for family in families for s in family.samples}


async def scrape_all(port: int) -> dict[tuple[str, str], float]:
    """The numbers once every worker has been heard of."""
    wanted = {("beamline_resources_rss_bytes", worker) for worker in WORKERS}
    served: dict[tuple[str, str], float] = {}
    async with deadline(30, "live numbers of every worker at the endpoint"):
        while not wanted <= served.keys():
            served = await asyncio.to_thread(scrape, port)
            await asyncio.sleep(0.1)  # nothing tells of it: it is what Prometheus would do
    return served


async def followed(run: EnginelessRun, *options: str) -> list[dict[str, Any]]:
    """What `beamline metrics --follow` has printed when the run has ended."""
    command = (sys.executable, "-m", "beamline.coordinator.cli", "metrics", str(run.path), "--follow", "--json")
    process = await asyncio.create_subprocess_exec(*command, *options, stdout=PIPE)
    async with deadline(60, "the run to end"):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


async def test_prometheus_and_all_loggers_have_the_run_s_numbers(tmp_path: Path) -> None:
    port = free_port()
    settings = ("run.loggers=[console,jsonl,tensorboard,wandb]", f"telemetry.prometheus_port={port}")
    run = await EnginelessRun.start(
        tmp_path, "told", f"trainer.num_steps={NUM_STEPS}", "run.placement=colocated", *settings
    )
    try:
        await run.shown("step  1/")
        steps = asyncio.create_task(followed(run, "--filter", "timing/step"))
        live = asyncio.create_task(followed(run, "--filter", "workers/in_flight/*", "--gauges"))
        await run.shown("step  3/")
        served = await scrape_all(port)
        await run.ended()
        step_lines, live_lines = await steps, await live
    finally:
        await run.kill()
    assert served["beamline_progress_num_steps", ""] == NUM_STEPS
    assert served["beamline_reward_mean", ""] in (1.0, -1.0)
    assert served["beamline_ledger_issued", ""] >= 3 * 4
    assert served["beamline_engine_groups", "rollout-0"] == served["beamline_grading_groups", "reward"] == 4
    for worker in WORKERS:
        assert served["beamline_resources_rss_bytes", worker] > 1 << 20
    assert [line["step"] for line in step_lines] == list(range(1, NUM_STEPS + 1))
    assert {name for line in live_lines for name in line["values"]} == {
        f"workers/in_flight/{worker}" for worker in WORKERS
    }
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    shown = [(r["time"], r["step"], r["values"]) for r in records]
    tensorboard = scalars(run.path / "tensorboard")
    assert {step for _, step, _ in tensorboard} == set(range(1, NUM_STEPS + 1))
    assert all((time, step) in {(t, s) for t, s, _ in shown} for time, step, _ in tensorboard)
    (offline,) = run.path.glob("wandb/offline-run-*/*.wandb")
    rows = {row["step"]: row for row in wandb_history(offline.read_bytes()) if "reward/mean" in row}
    assert {step: row["timing/step"] for step, row in rows.items()} == {
        step: values["timing/step"] for _, step, values in shown if "timing/step" in values
    }
