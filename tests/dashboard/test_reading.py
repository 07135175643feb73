"""What makes an open dashboard cheap: each byte is read once, and what is sent and drawn has bounds."""

import time
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.dashboard.board import EMPTY, change, draw
from beamline.coordinator.dashboard.charts import MAX_POINTS, thinned
from beamline.coordinator.dashboard.panels import troubles
from beamline.coordinator.dashboard.recent_spans import NUM_STEPS as NUM_TRACES
from beamline.coordinator.dashboard.recent_spans import RecentSpans
from beamline.coordinator.dashboard.run_files import NUM_ERRORS, RunFiles
from beamline.coordinator.dashboard.runs import find
from beamline.coordinator.dashboard.tail import Tail
from beamline.coordinator.metrics_file import MetricsFile
from beamline.coordinator.summary import StepValues
from beamline.protocol.errors import ConfigError
from shown_run import ShownRun, step_values

MANY_STEPS = 5_000


def test_a_tail_gives_whole_lines_once(tmp_path: Path):
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(b"one\ntw")
    assert tail.new() == [b"one"] and tail.new() == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.new() == [b"two", b"three"]
    path.unlink()
    assert tail.new() == []
    path.write_bytes(b"new\n")
    assert tail.new() == [b"new"] and tail.num_replaced == 1


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.new()
    with path.open("r+b") as file:
        file.truncate(4)
    assert tail.new() == [b"one"] and tail.num_replaced == 1


@pytest.mark.parametrize(("newest_bytes", "lines"), [(8, [b"line 9"]), (7, [b"line 9"]), (15, [b"line 8", b"line 9"])])
def test_of_a_long_file_the_end_is_read(tmp_path: Path, newest_bytes: int, lines: list[bytes]):
    (tmp_path / "file").write_bytes(b"".join(b"line %d\n" % number for number in range(10)))
    assert Tail(tmp_path / "file", newest_bytes).new() == lines


def test_many_steps_are_thinned_and_the_newest_stays():
    steps = [StepValues(step=step, values={}) for step in range(MANY_STEPS)]
    shown = thinned(steps, MAX_POINTS)
    assert MAX_POINTS / 2 < len(shown) <= MAX_POINTS + 1
    assert shown[0] is steps[0] and shown[-1] is steps[-1]
    longer = thinned([*steps, StepValues(step=MANY_STEPS, values={})], MAX_POINTS)
    assert longer[: len(shown) - 1] == shown[:-1], "what is drawn stays where it is"
    assert thinned(steps[:3], MAX_POINTS) == steps[:3] and thinned([], MAX_POINTS) == []


def test_a_step_more_of_thousands_is_a_small_change_read_and_drawn_at_once(tmp_path: Path):
    run_dir = tmp_path / "long"
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    values = step_values(7)
    lines = (msgspec.json.encode({"step": step, "time": 1.0, "values": values}) for step in range(1, MANY_STEPS + 1))
    metrics.path.write_bytes(b"\n".join(lines) + b"\n")
    files = RunFiles(run_dir)
    board = draw(files, None, (), files.poll(), EMPTY)
    whole = len(msgspec.json.encode(change(EMPTY, board)))
    assert whole < 300_000
    metrics.log(MANY_STEPS + 1, 2.0, values)
    began = time.process_time()
    news = files.poll()
    later = draw(files, None, (), news, board)
    assert time.process_time() - began < 0.3
    assert news == {"metrics"}
    assert len(msgspec.json.encode(change(board, later))) < 3_000
    began = time.process_time()
    for _ in range(20):
        assert files.poll() == set() and change(later, draw(files, None, (), set(), later)) == {}
    assert (time.process_time() - began) / 20 < 0.1, "what is not new costs next to nothing"


def test_a_change_makes_the_new_board_of_the_old(tmp_path: Path):
    run = ShownRun(tmp_path / "run")
    files, old = RunFiles(run.run_dir), EMPTY
    panels: dict[str, object] = {}
    rows: dict[str, list[dict[str, object]]] = {}
    for act in (lambda: run.evaluate(0), lambda: run.step(1), lambda: run.step(2), lambda: run.evaluate(5)):
        act()
        new = draw(files, None, (), files.poll(), old)
        found = change(old, new)
        panels |= found.get("panels", {})
        for key, part in found.get("rows", {}).items():
            rows[key] = rows.get(key, [])[part["drop"] :][: part["keep"]] + part["rows"]
        old = new
    assert panels == old.panels and rows == old.rows
    assert len(rows["reward-mean"]) == 2 and len(rows["accuracy"]) == 4


def test_spans_of_old_steps_are_forgotten(tmp_path: Path):
    run = ShownRun(tmp_path / "run")
    spans = RecentSpans(run.run_dir)
    for step in range(1, 8):
        run.step(step)
        assert spans.poll()
        assert len(spans.traces()) == min(step, NUM_TRACES + 1)
    assert not spans.poll()
    begins = [min(span.start_ns for span in trace) for trace in spans.traces()]
    assert begins == sorted(begins)
    late = RecentSpans(run.run_dir)
    late.poll()
    assert [len(trace) for trace in late.traces()] == [len(trace) for trace in spans.traces()]


def test_the_newest_errors_are_kept(tmp_path: Path):
    run = ShownRun(tmp_path / "run")
    files = RunFiles(run.run_dir)
    for number in range(NUM_ERRORS + 5):
        run.log_error("trainer", f"error {number}")
        assert "errors" in files.poll()
    (run.run_dir / "logs" / "reward.log").write_text(
        "Traceback (most recent call last):\n  File x\nKeyError: 'y'\nfine\n"
    )
    files.poll()
    assert len(files.errors) == NUM_ERRORS
    assert "errors" not in files.poll()


def test_a_run_that_does_not_exist_suggests_the_nearest(tmp_path: Path):
    ShownRun(tmp_path / "demo-7")
    with pytest.raises(ConfigError, match="the nearest is 'demo-7'"):
        find("demo7", tmp_path)
    with pytest.raises(ConfigError, match=r"it has none; `beamline run RECIPE` starts one"):
        find("demo", tmp_path / "nothing")
    assert find("demo-7", tmp_path) == find(str(tmp_path / "demo-7"), Path("elsewhere")) == tmp_path / "demo-7"


def test_a_printed_traceback_is_one_error(tmp_path: Path):
    logs = tmp_path / "logs"
    logs.mkdir()
    text = "starting\nTraceback (most recent call last):\n  File x, line 1\nKeyError: 'y'\nnext\n"
    (logs / "reward.log").write_text(text)
    files = RunFiles(tmp_path)
    files.poll()
    (trouble,) = troubles(files.errors, ())
    assert (trouble.worker, trouble.text) == ("reward", "KeyError: 'y'")
    assert trouble.detail.splitlines()[0].startswith("Traceback")
