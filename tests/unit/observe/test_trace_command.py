"""What a user names, and what is wrong with it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from beamline.coordinator.observe import trace_command
from beamline.coordinator.observe.trace_group import GroupTrace
from beamline.coordinator.observe.trace_step import StepTrace
from beamline.protocol.errors import ConfigError
from example_spans import write_example_traces


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs with the same traces, of which `newer` is the newer one, and one without any."""
    for age_s, name in ((100, "newer"), (200, "older"), (0, "untraced")):
        folder = tmp_path / name
        folder.mkdir()
        lock = folder / "launcher.lock"
        lock.touch()
        os.utime(lock, (1e9 - age_s, 1e9 - age_s))
        if name != "untraced":
            write_example_traces(folder)
    return tmp_path


def test_a_runs_name_gives_its_last_step_and_a_groups_id_its_way(runs: Path):
    step = trace_command.trace("older", runs, "", None)
    assert isinstance(step, StepTrace) and (step.run, step.step) == ("older", 2)
    newest = trace_command.trace("g-000003", runs, "", None)
    assert isinstance(newest, GroupTrace) and newest.run == "newer"
    named = trace_command.trace("g-000003", runs, "older", None)
    assert isinstance(named, GroupTrace) and named.run == "older"


def test_a_run_that_is_called_like_a_group_is_a_run(runs: Path):
    (runs / "older").rename(runs / "g-000003")
    found = trace_command.trace("g-000003", runs, "", None)
    assert isinstance(found, StepTrace) and found.run == "g-000003"


def test_json_adds_up(runs: Path):
    content = json.loads(trace_command.as_json(trace_command.trace("older", runs, "", 1)))
    assert (content["run"], content["step"], content["duration_s"]) == ("older", 1, 1.0)
    assert sum(piece["duration_s"] for piece in content["critical_path"]) == pytest.approx(1.0)
    assert {span["name"] for span in content["spans"] if span["critical"]} >= {"step", "train", "mini_batch"}


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda runs: trace_command.trace("oldre", runs, "", None), "the nearest is 'older'"),
        (lambda runs: trace_command.trace("g-000009", runs, "", None), "the nearest is 'g-000003' of run newer"),
        (lambda runs: trace_command.trace("g-000009", runs, "older", None), "in run older: the nearest is 'g-000003'"),
        (lambda runs: trace_command.trace("g-000001", runs, "oldre", None), "the nearest is 'older'"),
        (lambda runs: trace_command.trace("g-000001", runs, "", 1), "--step 1 belongs to a run"),
        (lambda runs: trace_command.trace("older", runs, "newer", None), "is not a group's id"),
        (lambda runs: trace_command.trace("older", runs, "", 7), "the nearest is 2"),
        (lambda runs: trace_command.trace("untraced", runs, "", None), r"no folder `traces`.*telemetry\.traces"),
        (lambda runs: trace_command.trace("g-000001", runs / "newer", "", None), "no run in .* has traces"),
        (
            lambda runs: trace_command.write_perfetto("g-000001", runs, None, runs / "x"),
            "is a group's id: name the run",
        ),
        (lambda runs: trace_command.write_perfetto("older", runs, 1, runs / "x"), "leave out --step 1"),
    ],
)
def test_what_cannot_be_shown_is_said_with_what_can(ask: Callable[[Path], object], why: str, runs: Path):
    with pytest.raises(ConfigError, match=why):
        ask(runs)


def test_perfettos_file_is_said_to_be_written(runs: Path):
    said = trace_command.write_perfetto("older", runs, None, runs / "out.pftrace")
    assert said == f"{runs / 'out.pftrace'}: 36 spans; open it at https://ui.perfetto.dev"
    assert (runs / "out.pftrace").stat().st_size > 1000
