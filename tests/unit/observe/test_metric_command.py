"""`beamline metrics` of a run that has ended: tables, filters and JSON lines, and plain words for what is not there."""

import json
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator import cli
from beamline.coordinator.metrics_file import MetricsFile, MetricsTail
from beamline.coordinator.observe.gauge_lines import GaugeLine
from beamline.coordinator.observe.metric_filter import MetricFilter
from beamline.protocol.errors import ConfigError


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run_dir = tmp_path / "demo-2"
    run_dir.mkdir()
    (run_dir / "launcher.lock").touch()
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    metrics.log(1, 10.0, {"policy/loss": 0.5, "reward/mean": -1.0, "timing/step": 2.25})
    metrics.log(2, 20.0, {"policy/loss": 0.123456789, "resources/rss_bytes/trainer": 2.0**30})
    live = [
        GaugeLine(time=time, service="rollout", worker="rollout-0", values={"engine/running/rollout-0": running})
        for time, running in ((11.0, 3.0), (21.0, 5.0))
    ]
    (run_dir / "gauges.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in live))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], runs: Path, *arguments: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["metrics", *arguments, "--runs", str(runs)])
    out, errors = capsys.readouterr()
    return end.value.code, out or errors


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()][1:]


def test_the_table_has_the_last_value_of_each_name(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert rows(shown(capsys, runs, "demo-2")[1]) == [
        ["policy/loss", "0.123457", "loss", "step", "2"],
        ["resources/rss_bytes/trainer", "1073741824", "bytes", "step", "2"],
        ["reward/mean", "-1", "reward", "step", "1"],
        ["timing/step", "2.25", "s", "step", "1"],
    ]


def test_live_numbers_have_their_own_table(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    ((name, value, unit, *age),) = rows(shown(capsys, runs, "demo-2", "--gauges")[1])
    assert (name, value, unit, age[1:]) == ("engine/running/rollout-0", "5", "requests", ["s", "ago"])


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_json_has_every_record_with_the_wanted_values(
    capsys: pytest.CaptureFixture[str], runs: Path, follow: tuple[str, ...]
) -> None:
    _, out = shown(capsys, runs, "demo-2", "--json", "--filter", "*loss", *follow)
    assert [json.loads(line) for line in out.splitlines()] == [
        {"step": 1, "time": 10.0, "values": {"policy/loss": 0.5}},
        {"step": 2, "time": 20.0, "values": {"policy/loss": 0.123456789}},
    ]
    _, out = shown(capsys, runs, "demo-2", "--json", "--gauges", *follow)
    assert [json.loads(line)["values"] for line in out.splitlines()] == [
        {"engine/running/rollout-0": 3.0}, {"engine/running/rollout-0": 5.0},
    ]  # fmt: skip


def test_following_an_ended_run_prints_its_records(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    _, out = shown(capsys, runs, "demo-2", "--follow", "--filter", "policy/*")
    assert out.splitlines() == ["step     1  policy/loss  0.5 loss", "step     2  policy/loss  0.123457 loss"]


def test_a_filter_that_matches_nothing_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    code, line = shown(capsys, runs, "demo-2", "--filter", "polcy/los")
    assert code == 2
    assert line.startswith("beamline: no metric matches 'polcy/los': the nearest are 'policy/loss', ")
    code, line = shown(capsys, runs, "demo-2", "--filter", "grading/*")
    assert (code, line.strip()) == (
        2, "beamline: run demo-2 has no metric that matches 'grading/*' yet: `--follow` waits for it",
    )  # fmt: skip


def test_a_run_that_does_not_exist_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    code, line = shown(capsys, runs, "demo")
    assert code == 2 and "the nearest is 'demo-2'" in line


@pytest.mark.parametrize("glob", ["", "*", "reward/*", "engine/*/rollout-7", "eval/gsm8k/pass_at_*", "mine/x"])
def test_globs_that_the_schema_or_the_run_can_match(glob: str) -> None:
    MetricFilter(glob).check(["mine/x"])


@pytest.mark.parametrize("glob", ["reward", "engine/nothing/*", "*unheard*"])
def test_globs_that_nothing_matches(glob: str) -> None:
    with pytest.raises(ConfigError, match="no metric matches"):
        MetricFilter(glob).check(["mine/x"])


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    metrics = MetricsFile(path)
    metrics.log(1, 1.0, {"policy/loss": 1.0})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "time"')
        file.flush()
        assert [line.step for line in tail.read()] == [1]
        file.write(b': 2.0, "values": {}}\nnonsense\n')
    with pytest.raises(ConfigError, match="line 3 is not a metrics record"):
        tail.read()
