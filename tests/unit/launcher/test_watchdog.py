"""Services that fall silent are named while the run goes on; those that die end it with their traceback and code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from beamline.coordinator.launch.process_table import BROKER, LAUNCHER, ProcessTable, read_processes
from beamline.runtime.process_state import catches, look_at, stop_in_words, stopped_in
from launcher_fakes import launch, noted_pids, read_until


async def test_a_frozen_and_a_blocked_worker_are_named_and_the_blocked_one_says_where_it_is(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=follow", "reward=freeze", "rollout_0=block")
    run_dir = tmp_path / "runs" / "trial"
    shown = await read_until(process, "reward has not sent a heartbeat", "rollout-0 has not sent a heartbeat")
    pids = read_processes(run_dir)
    assert set(pids) == {LAUNCHER, BROKER, "coordinator", "reward", "trainer", "rollout-0"}
    assert pids[LAUNCHER] == process.pid
    reward = pids["reward"]
    assert re.search(
        rf"reward has not sent a heartbeat for \d+ s: its process {reward} is stopped by a signal, as SIGSTOP does "
        rf"\(state T\): `kill -CONT {reward}` lets it go on",
        shown,
    )
    log = run_dir / "logs" / "rollout-0.log"
    assert f"the stacks of its threads (process {pids['rollout-0']}) are in {log}" in shown
    os.kill(reward, signal.SIGCONT)
    await read_until(process, "reward is heard of again")
    assert "in hold_the_loop" in log.read_text()
    os.kill(pids[BROKER], signal.SIGSTOP)
    await read_until(process, f"nats-server passes nothing on: its process {pids[BROKER]} is stopped")
    process.kill()
    rest = await read_until(process)
    assert (shown + rest).count("has not sent a heartbeat") == 2, "each silence is told once"
    assert [pid for pid in noted_pids(run_dir) if look_at(pid) is not None] == []


@pytest.mark.parametrize(("behaviour", "code"), [("crash", 1), ("leave", 7), ("die", 128 + signal.SIGTERM)])
async def test_a_run_ends_with_the_exit_code_of_the_service_that_ended_it(
    tmp_path: Path, behaviour: str, code: int
) -> None:
    process = await launch(tmp_path, "coordinator=idle", f"trainer={behaviour}")
    shown = await read_until(process)
    assert await process.wait() == code, shown
    if behaviour == "crash":
        told, _, end = shown.partition("beamline: trainer ended with exit code 1")
        assert end, shown
        assert "trainer failed: RuntimeError: the loss is NaN at step 3\n  Traceback (most recent call last):" in told
        assert 'fake_service.py", line' in told, "the traceback is shown when it comes, not at the end"


def test_the_table_of_processes_outlives_damage(tmp_path: Path) -> None:
    assert read_processes(tmp_path) == {}
    table = ProcessTable(tmp_path)
    table.note("reward", 7)
    table.note("reward", 8)
    assert read_processes(tmp_path) == {LAUNCHER: os.getpid(), "reward": 8}
    (tmp_path / "processes.json").write_text('{"reward": ')
    assert read_processes(tmp_path) == {}


def test_the_kernel_s_view_of_this_process() -> None:
    here = look_at(os.getpid())
    assert here is not None and not here.is_stopped and "python" in here.command
    assert stopped_in(os.getpid()) == []
    assert look_at(2**22 + 1) is None and not catches(2**22 + 1, signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert not catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_is_stopped_and_how_it_goes_on() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGSTOP)"])
    try:
        os.waitpid(child.pid, os.WUNTRACED)
        (stopped,) = stopped_in(os.getpid())
        assert (stopped.pid, stopped.state) == (child.pid, "T")
        assert f"`kill -CONT {child.pid}` lets it go on" in stop_in_words(stopped, child.pid)
        assert "which it started" in stop_in_words(stopped, os.getpid())
    finally:
        child.kill()
        child.wait()
