"""A launcher that is interrupted, ended or killed leaves no process and no shared memory."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from beamline.coordinator.launch.process_table import read_processes
from launcher_fakes import alive, launch, noted_pids, read_until, shared_memory


def ready(*workers: str) -> Sequence[str]:
    return [f"{worker} is ready" for worker in workers]


def assert_nothing_left(folder: Path) -> None:
    run_dir = folder / "runs" / "trial"
    assert len(noted_pids(run_dir)) >= 3
    assert [pid for pid in noted_pids(run_dir) if alive(pid)] == []
    assert not shared_memory(run_dir).exists()


async def test_sigkill_of_the_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=follow", "rollout_0=child", "trainer=deaf")
    await read_until(process, *ready("rollout-0", "trainer", "reward", "coordinator"))
    assert shared_memory(tmp_path / "runs" / "trial").is_dir()
    process.kill()
    await read_until(process)
    assert_nothing_left(tmp_path)


async def test_the_first_interrupt_lets_the_step_end(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=follow")
    await read_until(process, *ready("rollout-0", "trainer", "reward", "coordinator"))
    process.send_signal(signal.SIGINT)
    rest = await read_until(process)
    assert "stopping after the step under way; Ctrl-C again stops at once" in rest
    assert await process.wait() == 0, rest
    assert_nothing_left(tmp_path)


async def test_the_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=idle")
    await read_until(process, *ready("rollout-0", "trainer", "reward", "coordinator"))
    process.send_signal(signal.SIGINT)
    await read_until(process, "Ctrl-C again stops at once")
    process.send_signal(signal.SIGINT)
    rest = await read_until(process)
    assert "the run was interrupted" in rest
    assert await process.wait() == 130
    assert_nothing_left(tmp_path)


async def test_a_run_that_was_asked_to_end_does_not_go_on_without_its_trainer(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=idle")
    await read_until(process, *ready("rollout-0", "trainer", "reward", "coordinator"))
    process.send_signal(signal.SIGINT)
    await read_until(process, "Ctrl-C again stops at once")
    os.kill(read_processes(tmp_path / "runs" / "trial")["trainer"], signal.SIGKILL)
    rest = await read_until(process)
    assert "the optimizer's state went with it, and the run had been asked to end" in rest
    assert await process.wait() == 128 + signal.SIGKILL
    assert_nothing_left(tmp_path)


async def test_sigterm_ends_the_run_at_once(tmp_path: Path) -> None:
    process = await launch(tmp_path, "coordinator=follow", "rollout_0=child")
    await read_until(process, *ready("rollout-0", "trainer", "reward", "coordinator"))
    process.terminate()
    assert "the run was interrupted" in await read_until(process)
    assert await process.wait() == 130
    assert_nothing_left(tmp_path)
