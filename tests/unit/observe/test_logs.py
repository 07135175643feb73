"""`beamline logs`: every worker's lines by time, filtered, followed, and of a run that is half gone."""

import asyncio
import fcntl
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.coordinator.observe.log_print import coloured, print_plain
from beamline.coordinator.observe.logs import Wanted, show_logs
from beamline.protocol.errors import ConfigError
from beamline.runtime.credentials import Credentials, write_credentials
from beamline.runtime.deadline import deadline
from beamline.runtime.json_log import LogLine


def line(second: int, worker: str, message: str, level: str = "INFO", step: int | None = None) -> LogLine:
    time = f"2026-01-31T12:00:{second:02}.000Z"
    return LogLine(time=time, level=level, worker=worker, logger="beamline.a", message=message, step=step)


def write(run_dir: Path, worker: str, *lines: LogLine | str) -> None:
    """Append to a worker's log."""
    path = run_dir / "logs" / f"{worker}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for text in lines:
            file.write((text.encode() if isinstance(text, str) else msgspec.json.encode(text)) + b"\n")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three workers."""
    run_dir = tmp_path / "demo"
    write(run_dir, "trainer", line(1, "trainer", "one"), "raw", line(5, "trainer", "five", "ERROR", step=2))
    write(run_dir, "rollout-0", line(2, "rollout-0", "two", step=1), line(4, "rollout-0", "four", "WARNING", step=2))
    write(run_dir, "rollout-1", line(3, "rollout-1", "three"))
    (run_dir / LOCK_FILE).touch()
    return run_dir


async def messages(run_dir: Path, wanted: Wanted) -> list[str]:
    shown: list[LogLine] = []
    await show_logs(run_dir, wanted, shown.append, follow=False)
    return [record.message for record in shown]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(), ["one", "raw", "two", "three", "four", "five"]),
        (Wanted(who="rollout"), ["two", "three", "four"]),
        (Wanted(who="rollout-1"), ["three"]),
        (Wanted(step=2), ["four", "five"]),
        (Wanted(level="WARNING"), ["four", "five"]),
        (Wanted(who="rollout", step=2, level="ERROR"), []),
    ],
    ids=["all", "service", "worker", "step", "level", "nothing"],
)
async def test_lines_of_all_workers_come_by_time(run_dir: Path, wanted: Wanted, expected: list[str]) -> None:
    assert await messages(run_dir, wanted) == expected


async def test_what_is_not_there_is_said_with_the_nearest(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no log of 'trianer': the nearest is 'trainer'"):
        await messages(run_dir, Wanted(who="trianer"))
    with pytest.raises(ConfigError, match="no log of 'zzz': it has rollout-0, rollout-1, trainer"):
        await messages(run_dir, Wanted(who="zzz"))
    with pytest.raises(ConfigError, match="--level=LOUD: it is one of DEBUG, INFO"):
        Wanted(level="LOUD")


async def test_a_folder_that_is_half_gone(run_dir: Path) -> None:
    (run_dir / "logs" / "rollout-0.log").unlink()
    (run_dir / "logs" / "trainer.log").write_bytes(b'{"time":"2026-01-31T12:00:09.000Z","lev\n\xff\xfe\x00\n')
    assert await messages(run_dir, Wanted()) == ['{"time":"2026-01-31T12:00:09.000Z","lev', "\ufffd\ufffd", "three"]
    for path in (run_dir / "logs").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"run demo has no logs: .*/logs is missing or empty"):
        await messages(run_dir, Wanted())


async def test_a_live_run_is_followed_to_its_end(run_dir: Path) -> None:
    shown: asyncio.Queue[str] = asyncio.Queue()

    async def next_message() -> str:
        async with deadline(10, "a line of the log"):
            return await shown.get()

    write_credentials(run_dir, "cli", Credentials(url="nats://127.0.0.1:1"))
    with (run_dir / LOCK_FILE).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        show = show_logs(run_dir, Wanted(), lambda record: shown.put_nowait(record.message), follow=True)
        following = asyncio.create_task(show)
        assert [await next_message() for _ in range(6)] == ["one", "raw", "two", "three", "four", "five"]
        half, rest = (
            '{"time":"2026-01-31T12:00:07.000Z","level":"INFO",',
            '"worker":"reward","logger":"a","message":"x"}',
        )
        with (run_dir / "logs" / "trainer.log").open("a") as file:
            file.write(half)
            file.flush()
            write(run_dir, "reward", line(6, "reward", "a worker that comes later"))
            assert await next_message() == "a worker that comes later"
            file.write(rest)
        write(run_dir, "trainer", "", "printed without an end")
        assert await next_message() == "x"
        assert await next_message() == "printed without an end"
        with (run_dir / "logs" / "reward.log").open("a") as file:
            file.write("killed in mid-li")
    async with deadline(10, "the end of the run to be seen"):
        await following
    assert await next_message() == "killed in mid-li"


def test_a_line_on_paper_and_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    record = line(1, "rollout-0", "two\nlines", "ERROR", step=3)
    print_plain(record)
    print_plain(LogLine(time="", level="INFO", worker="rollout-0", logger="", message="raw"))
    assert capsys.readouterr().out.splitlines() == [
        "12:00:01.000 rollout-0    ERROR    beamline.a (step 3): two",
        "    lines",
        "--:--:--.--- rollout-0             raw",
    ]
    text = coloured(record)
    assert text.plain.startswith("12:00:01.000 rollout-0    ERROR    beamline.a (step 3): two\n")
    assert "bold red" in {str(span.style) for span in text.spans}


async def test_the_command_in_a_pipe(run_dir: Path) -> None:
    command = [sys.executable, "-m", "beamline.coordinator.cli", "logs", "demo", "--runs", str(run_dir.parent)]

    async def ended(*options: str) -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(*command, *options, stdout=PIPE, stderr=PIPE)
        async with deadline(20, "the command to end"):
            out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()

    code, out, _ = await ended("trainer", "--json")
    assert code == 0
    assert [json.loads(text)["message"] for text in out.splitlines()] == ["one", "raw", "five"]
    code, out, err = await ended("trianer")
    assert (code, out) == (2, "")
    assert err == "beamline: run demo has no log of 'trianer': the nearest is 'trainer'\n"
    assert "\x1b" not in (await ended("--level", "warning"))[1]
