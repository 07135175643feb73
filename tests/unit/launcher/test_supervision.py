"""The launcher with a real broker and processes whose ends are arranged: what comes back, what stops, what is left."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from beamline.coordinator.launch.run import DRAIN_DEADLINE_S, run
from beamline.coordinator.launch.supervisor import RestartPolicy, RunFailed, Supervisor
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from launcher_fakes import LineDisplay, alive, fake_command, noted_pids, shared_memory

DEADLINE_S = 60


async def run_with(config: RunConfig, display: LineDisplay, **behaviours: str) -> Path:
    return await asyncio.wait_for(run(config, display, command=fake_command(**behaviours)), DEADLINE_S)


def assert_nothing_left(run_dir: Path) -> None:
    assert noted_pids(run_dir), "the fake services have noted their pids"
    assert [pid for pid in noted_pids(run_dir) if alive(pid)] == []
    assert not shared_memory(run_dir).exists()


async def test_a_run_ends_when_its_coordinator_has_finished(config: RunConfig) -> None:
    display = LineDisplay()
    run_dir = await run_with(config, display, coordinator="finish,reward,trainer", reward="once", rollout_0="child")
    shown = "\n".join(display.lines)
    assert "reward was killed by SIGKILL; starting it again" in shown
    assert "nats-server is ready at nats://127.0.0.1:" in shown
    assert "trainer is ready" in shown
    assert "step  1/50  reward 0.500  2.0 s" in shown
    assert "eval sums of policy 1: accuracy 75.0% [70.0%, 80.0%] (4 problems, 8 each)" in shown
    assert (run_dir / "reward.starts").read_text() == "xx"
    assert (run_dir / "child.pid").is_file()
    assert_nothing_left(run_dir)


async def test_the_services_read_a_resolved_configuration(config: RunConfig) -> None:
    run_dir = await run_with(config, LineDisplay(), coordinator="finish")
    resolved = json.loads((run_dir / "config.json").read_text())
    assert resolved["model"]["path"] == str(run_dir / "model")
    for path in (resolved["data"]["train"], resolved["data"]["evals"][0]["path"]):
        assert Path(path).is_file()
    assert resolved["trainer"]["threads"] > 0


async def test_a_setting_that_a_service_refuses_stops_the_run_with_its_line(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"^trainer.optimizer.lr=-1: must be above 0$"):
        await run_with(config, LineDisplay(), trainer="refuse")
    assert_nothing_left(Path(config.run.dir) / "trial")


async def test_a_trainer_that_died_stops_the_run_with_its_traceback_and_log(config: RunConfig) -> None:
    with pytest.raises(RunFailed) as failure:
        await run_with(config, LineDisplay(), trainer="crash", rollout_0="child")
    text = str(failure.value)
    assert "trainer ended with exit code 1; the optimizer's state went with it" in text
    assert "RuntimeError: the loss is NaN at step 3" in text
    assert str(Path(config.run.dir) / "trial" / "logs" / "trainer.log") in text
    assert_nothing_left(Path(config.run.dir) / "trial")


async def test_a_coordinator_in_mid_step_keeps_nobody_waiting(config: RunConfig) -> None:
    started = time.monotonic()
    with pytest.raises(RunFailed, match="the loss is NaN"):
        await run_with(config, LineDisplay(), trainer="crash", coordinator="deaf")
    assert time.monotonic() - started < DRAIN_DEADLINE_S / 2
    assert_nothing_left(Path(config.run.dir) / "trial")


async def test_a_coordinator_that_gave_up_is_not_started_again(config: RunConfig) -> None:
    with pytest.raises(RunFailed, match="coordinator ended with exit code 1"):
        await run_with(config, LineDisplay(), coordinator="crash")
    assert (Path(config.run.dir) / "trial" / "coordinator.starts").read_text() == "x"


class ArrangedWorker:
    def __init__(self, code: int) -> None:
        self._code = code

    async def wait(self) -> int:
        return self._code


class ArrangedLauncher:
    """Workers that end at once, with the codes given by worker; after those, they live on."""

    def __init__(self, codes: dict[str, list[int]]) -> None:
        self._codes = codes
        self.started: list[str] = []

    async def start(self, spec):
        self.started.append(spec.worker)
        codes = self._codes.get(spec.worker, [])
        if not codes:
            await asyncio.Event().wait()
        return ArrangedWorker(codes.pop(0))

    async def stop(self, deadline_s: float) -> None:
        pass


def supervise(launcher: ArrangedLauncher, config: RunConfig, tmp_path: Path, done: bool = True):
    from beamline.coordinator.launch.run import worker_specs

    policy = RestartPolicy(max_restarts=3, first_delay_s=0.001)
    supervisor = Supervisor(launcher, policy, notify=lambda line: None, now=lambda: 0.0, done=lambda: done)
    return asyncio.wait_for(supervisor.run(worker_specs(config, tmp_path)), DEADLINE_S)


async def test_restarts_have_a_limit(config: RunConfig, tmp_path: Path) -> None:
    launcher = ArrangedLauncher({"reward": [-9, 1, -11, 1]})
    with pytest.raises(RunFailed, match=r"reward ended with exit code 1; it was started 3 times again within 600 s"):
        await supervise(launcher, config, tmp_path)
    assert launcher.started.count("reward") == 4


async def test_a_killed_coordinator_is_started_again(config: RunConfig, tmp_path: Path) -> None:
    launcher = ArrangedLauncher({"coordinator": [-9, 3, 0]})
    await supervise(launcher, config, tmp_path)
    assert launcher.started.count("coordinator") == 3


async def test_a_drained_coordinator_has_not_finished_the_run(config: RunConfig, tmp_path: Path) -> None:
    launcher = ArrangedLauncher({"coordinator": [0, 0, 0, 0]})
    with pytest.raises(RunFailed, match="coordinator ended with exit code 0; it was started 3 times again"):
        await supervise(launcher, config, tmp_path, done=False)


def test_the_wait_between_restarts_grows_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=15.0)
    assert [policy.delay_s(n) for n in range(7)] == [0.5, 1, 2, 4, 8, 15, 15]
