"""What a command shows of its long work, on a terminal and in a pipe."""

import io
import queue
import sys
from pathlib import Path

from rich.console import Console

from beamline.coordinator.progress_bar import BarWork, LineWork, tracked
from prompt_files import json_lines, row
from terminals import OnTerminal


def test_a_bar_tells_how_far_the_part_is() -> None:
    file = io.StringIO()
    with BarWork(Console(file=file, force_terminal=True, color_system=None, width=120)) as work:
        assert list(tracked(work, "rows read", range(1500), 3000)) == list(range(1500))
        work.part("a grader [bold] reads")
        work.advance(7)
    text = file.getvalue()
    assert "rows read" in text and "a grader [bold] reads" in text
    assert text.rstrip().endswith("\x1b[2K"), "nothing is left of it"


def test_in_a_pipe_long_work_is_named_and_then_counted() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with LineWork(lines.put, shown_after_s=0.02, told_every_s=0.02) as work:
        work.part("one long call")
        assert lines.get(timeout=10) == "one long call ..."
        work.part("rows", total=3000)
        work.advance(1000)
        while (line := lines.get(timeout=10)) == "one long call ...":
            pass
        assert line == "rows: 1,000/3,000"
        work.part("lines")
        work.advance(5)
        while (line := lines.get(timeout=10)) == "rows: 1,000/3,000":
            pass
        assert line == "lines: 5"


def test_in_a_pipe_nothing_is_said_of_short_work() -> None:
    lines: list[str] = []
    with LineWork(lines.append) as work:
        assert list(tracked(work, "rows", iter("abc"), None)) == ["a", "b", "c"]
    assert lines == []


async def test_a_command_on_a_terminal_shows_its_bar(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "many.jsonl", *(row(index) for index in range(5000)))
    command = [sys.executable, "-m", "beamline.coordinator.cli", "data", "check", str(file), "--grader", "none"]
    terminal = await OnTerminal.start(command, 100, 24)
    try:
        code, _ = await terminal.ended()
        assert code == 0, terminal.output
        assert "rows looked at" in terminal.output
        assert "5,000 rows" in terminal.output
    finally:
        await terminal.close()
