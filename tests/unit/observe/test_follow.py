"""A view that follows a live run over a real broker, and one of a run that has ended."""

import asyncio
import fcntl
from pathlib import Path

import pytest

from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.coordinator.metrics_file import MetricsFile
from beamline.coordinator.observe.follow import follow_run, until_set_up
from beamline.coordinator.observe.view import RunView
from beamline.protocol import messages as m
from beamline.protocol.config import RunConfig, RunSection, TrainerSection
from beamline.protocol.errors import ConfigError
from beamline.runtime.credentials import Credentials, write_credentials
from beamline.runtime.deadline import deadline
from bus_messages import heartbeat, status_reply
from live_run import live_run

CONFIG = RunConfig(run=RunSection(name="followed"), trainer=TrainerSection(num_steps=5))


class Heard:
    """Follows a run and can be asked to wait until the view shows something."""

    def __init__(self, run_dir: Path) -> None:
        self.view = RunView()
        self._changed = asyncio.Event()
        self.following = asyncio.create_task(follow_run(run_dir, self.view, lambda message: self._changed.set()))

    async def until(self, what: str) -> None:
        """Until an expression of the view is true: `what` names the attribute that is awaited."""
        async with deadline(10, what):
            while not getattr(self.view, what):
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({changed, self.following}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                assert not self.following.done(), self.following
                self._changed.clear()


async def test_a_live_run_is_followed_to_its_end(tmp_path: Path) -> None:
    async with live_run(tmp_path, CONFIG) as run:
        MetricsFile(run.run_dir / "metrics.jsonl").log(1, 1.0, {"timing/step": 2.0, "eval/sums/accuracy": 0.5})
        coordinator, rollout = await run.bus("coordinator"), await run.bus("rollout")
        serving = asyncio.create_task(coordinator.serve(answer))
        heard = Heard(run.run_dir)
        await heard.until("ledger")  # it listens now, and has been answered
        assert heard.view.policy_version == 2
        assert heard.view.evaluations["sums"].values == {"accuracy": 0.5}
        await rollout.publish(heartbeat("rollout-0"))
        await heard.until("workers")
        await rollout.publish(m.Metrics(service="rollout", worker="rollout-0", step=-1, values={"x": 1.0}))
        await heard.until("gauges")
        await rollout.publish(m.ServiceFailed(service="rollout", worker="rollout-0", error="no", traceback=""))
        await heard.until("failures")
        await coordinator.publish(phase(m.PhaseName.DONE))
        await heard.until("is_done")
        run.end()
        async with deadline(10, "the follower to see the run's end"):
            await heard.following
        serving.cancel()


async def test_a_broker_that_comes_back_is_followed_on(tmp_path: Path) -> None:
    async with live_run(tmp_path, CONFIG) as run:
        coordinator = await run.bus("coordinator")
        await coordinator.publish(phase(m.PhaseName.TRAIN))
        heard = Heard(run.run_dir)
        await heard.until("phase_since")
        await run.server.restart()
        await coordinator.publish(phase(m.PhaseName.DONE))
        await heard.until("is_done")
        heard.following.cancel()


async def test_a_run_that_has_ended_is_recalled(tmp_path: Path) -> None:
    async with live_run(tmp_path, CONFIG) as run:
        MetricsFile(run.run_dir / "metrics.jsonl").log(4, 7.0, {"timing/step": 2.0})
        run.end()
        view = RunView()
        await follow_run(run.run_dir, view, lambda message: None)
        assert (view.num_steps, view.policy_version, view.is_done) == (5, 4, False)
        (run.run_dir / "metrics.jsonl").write_text("no record\n")
        with pytest.raises(ConfigError, match="line 1 is not a metrics record"):
            await follow_run(run.run_dir, RunView(), lambda message: None)


async def answer(_: m.Message) -> m.Message:
    return status_reply()


def phase(name: m.PhaseName) -> m.Phase:
    return m.Phase(sequence=1, step=3, phase=name, policy_version=2, granted=True)


async def test_a_run_that_is_being_set_up_is_waited_for(tmp_path: Path) -> None:
    run_dir = tmp_path / CONFIG.run.name
    run_dir.mkdir()
    with (run_dir / LOCK_FILE).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = asyncio.create_task(until_set_up(run_dir))
        await asyncio.sleep(0)
        assert not waiting.done()
        write_credentials(run_dir, "cli", Credentials(url="nats://127.0.0.1:1"))
        async with deadline(10, "the run to be set up"):
            await waiting
