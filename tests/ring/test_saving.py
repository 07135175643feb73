"""Policies are kept while the run goes on: once, whatever dies in between, and a save that fails ends no run."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from beamline.coordinator.journal import decode_record
from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.summary import read_summary
from beamline.protocol import messages as m
from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.errors import BeamlineError
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub
from ring_run import RING_DEADLINE_S, Ring, check, configure
from scripted_services import Mishaps

CALM = Mishaps()
MOMENTS = [f"{when} {what}" for what in ("SaveAsked", "SaveRequest", "Copied", "Saved") for when in ("before", "after")]


class FatalBus(MemoryBus):
    """The coordinator's; at one moment of the saving its process dies."""

    def __init__(self, hub: MemoryHub, moment: str, number: int, kill: Callable[[], None]) -> None:
        super().__init__(hub)
        self.moment, self.number, self.kill = moment, number, kill

    async def append(self, record: bytes) -> None:
        name = type(decode_record(record)).__name__
        await self.reach(f"before {name}")
        await super().append(record)
        await self.reach(f"after {name}")

    async def publish(self, message: m.Message) -> None:
        await self.reach(f"before {type(message).__name__}")
        await super().publish(message)
        await self.reach(f"after {type(message).__name__}")

    async def reach(self, moment: str) -> None:
        if moment == self.moment:
            self.number -= 1
            if self.number == 0:
                self.kill()
                await asyncio.Event().wait()


class FatalRing(Ring):
    """The coordinator is killed at a moment, started again, and perhaps asked to stop then."""

    def __init__(self, run_dir: Path, config: RunConfig, *moments: tuple[str, int], stops: bool = False) -> None:
        super().__init__(moments[0][1], run_dir, config=config, mishaps=CALM, num_kills=0)
        self.moments = moments
        self.stops = stops

    def die(self) -> None:
        self.coordinator.cancel()

    async def until_done(self) -> None:
        for number, moment in enumerate(self.moments):
            self.coordinator_bus = FatalBus(self.hub, *moment, self.die)
            self.coordinator = asyncio.create_task(self.coordinate())
            await asyncio.sleep(0)
            self.core.stopping = self.stops and number > 0
            await asyncio.gather(self.coordinator, return_exceptions=True)
            assert self.coordinator.cancelled(), f"{moment} was never reached"
        self.coordinator_bus = self.bus
        self.coordinator = asyncio.create_task(self.coordinate())
        await asyncio.sleep(0)
        self.core.stopping = self.stops
        await self.coordinator


def config_of(*, placement: Placement = Placement.DISAGGREGATED, **trainer: Any) -> RunConfig:
    config = configure(random.Random(1), {})
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, placement=placement),
        coordinator=msgspec.structs.replace(config.coordinator, max_staleness=0),
        trainer=msgspec.structs.replace(config.trainer, eval_interval=2, **trainer),
    )


def values_of(run_dir: Path, name: str) -> dict[int, float]:
    """The last value of a metric by step."""
    return {line.step: line.values[name] for line in read_metrics(run_dir / "metrics.jsonl") if name in line.values}


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_coordinator_killed_around_a_save_saves_once(
    moment: str, number: int, placement: Placement, tmp_path: Path
) -> None:
    config = config_of(placement=placement, checkpoint_interval=1, export_interval=0)
    ring = FatalRing(tmp_path, config, (moment, number))
    asyncio.run(ring.run())
    check(ring)
    summary = read_summary(tmp_path / "summary.json")
    assert summary.artifacts.checkpoint == "checkpoints/global_step_4"
    assert summary.artifacts.export == "exports/global_step_4/policy"
    assert values_of(tmp_path, "checkpoint/failed") == {1: 0, 2: 0, 3: 0, 4: 0}
    assert values_of(tmp_path, "checkpoint/copy_s").keys() == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("intervals", "kept", "lacking"),
    [
        ({"checkpoint_interval": 2, "export_interval": 0}, (True, False), (False, True)),
        ({"checkpoint_interval": 3, "export_interval": 2}, (False, True), (True, False)),
    ],
)
@pytest.mark.parametrize("again", [[], [("after SaveAsked", 1)], [("after SaveRequest", 1)]], ids=str)
def test_a_run_that_is_stopped_right_after_a_save_keeps_what_its_end_lacks(
    intervals: dict[str, int],
    kept: tuple[bool, bool],
    lacking: tuple[bool, bool],
    again: list[tuple[str, int]],
    tmp_path: Path,
) -> None:
    ring = FatalRing(tmp_path, config_of(**intervals), ("after Copied", 1), *again, stops=True)
    asyncio.run(ring.run())
    assert [(save.step, save.checkpoint, save.export) for save in ring.witness.saves] == [(2, *kept), (2, *lacking)]
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.status, summary.artifacts.checkpoint) == ("stopped", "checkpoints/global_step_2")
    assert summary.artifacts.export == "exports/global_step_2/policy"


def test_a_stopped_run_saves_the_step_at_which_it_ends(tmp_path: Path) -> None:
    class Stopped(Ring):
        async def until_done(self) -> None:
            coordinator = asyncio.create_task(self.coordinate())
            await asyncio.sleep(0)
            await self.core.pulse.until(lambda: self.core.ledger.pending_step == 3)
            await self.bus.request(m.StopRequest())
            await coordinator

    ring = Stopped(0, tmp_path, config=config_of(checkpoint_interval=10), mishaps=CALM, num_kills=0)
    asyncio.run(ring.run())
    assert [(save.step, save.checkpoint, save.export) for save in ring.witness.saves] == [(3, True, True)]
    assert read_summary(tmp_path / "summary.json").status == "stopped"


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize(("interval", "written", "evaluated"), [(3, 3, 2), (10, 4, 4)])
def test_the_run_goes_on_while_a_save_is_written_until_the_next_or_its_end(
    interval: int, written: int, evaluated: int, placement: Placement, tmp_path: Path
) -> None:
    class Held(Ring):
        """No save is written before the run waits for it."""

        async def until_done(self) -> None:
            await self.trainer.writing.acquire()
            coordinator = asyncio.create_task(self.coordinate())
            await asyncio.sleep(0)
            await self.core.pulse.until(lambda: "keeps of policy" in self.core.pulse.waiting_for())
            self.waited_for, self.phase = self.core.pulse.waiting_for(), self.lease.phase
            assert self.core.ledger.step == 4 and max(self.core.state.evaluated) == evaluated
            self.trainer.writing.release()
            await coordinator

    config = config_of(placement=placement, checkpoint_interval=interval, export_interval=0)
    ring = Held(0, tmp_path, config=config, mishaps=CALM, num_kills=0)
    asyncio.run(ring.run())
    check(ring)
    assert ring.waited_for == f"the trainer to write what it keeps of policy {written}"
    assert ring.phase is m.PhaseName.CHECKPOINT


def test_the_wait_for_the_copy_is_named(tmp_path: Path) -> None:
    config = config_of(checkpoint_interval=1)
    short = msgspec.structs.replace(config.coordinator, step_deadline_s=0.5)
    ring = Ring(0, tmp_path, config=msgspec.structs.replace(config, coordinator=short), mishaps=CALM, num_kills=0)

    async def keep(request: m.SaveRequest) -> m.Message:
        return await asyncio.Event().wait() or m.StateCopied(step=request.step, copy_s=0.0)

    ring.trainer.keep = keep
    with pytest.raises(BeamlineError, match=r"waited 0\.5 s for the trainer's copy of policy 1"):
        asyncio.run(asyncio.wait_for(ring.run(), RING_DEADLINE_S))


def test_a_save_that_fails_is_said_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(checkpoint_interval=1)
    ring = Ring(0, tmp_path, config=config, mishaps=Mishaps(unsaved=frozenset({2, 3})), num_kills=0)
    asyncio.run(ring.run())
    check(ring)
    assert read_summary(tmp_path / "summary.json").artifacts.checkpoint == "checkpoints/global_step_4"
    assert values_of(tmp_path, "checkpoint/failed") == {1: 0, 2: 1, 3: 1, 4: 0}
    assert values_of(tmp_path, "checkpoint/num_bytes").keys() == {1, 4}
    said = [record.message for record in caplog.records if "was to be saved" in record.message]
    assert said == [f"policy {n} was to be saved, and the run goes on without: no space left on device" for n in (2, 3)]


def test_a_run_whose_last_policy_is_not_saved_fails_with_the_reason(tmp_path: Path) -> None:
    config = config_of(checkpoint_interval=2)
    ring = Ring(0, tmp_path, config=config, mishaps=Mishaps(unsaved=frozenset({4})), num_kills=0)
    with pytest.raises(BeamlineError, match="its last policy, 4, is not saved: no space left on device"):
        asyncio.run(ring.run())
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.status, summary.artifacts.checkpoint) == ("failed", "checkpoints/global_step_2")


def test_a_run_without_checkpoints_exports_its_last_policy(tmp_path: Path) -> None:
    ring = Ring(0, tmp_path, config=config_of(checkpoint_interval=0, export_interval=3), mishaps=CALM, num_kills=0)
    asyncio.run(ring.run())
    check(ring)
    assert [(save.step, save.checkpoint, save.export) for save in ring.witness.saves] == [
        (3, False, True),
        (4, False, True),
    ]
    assert ring.witness.files == {}
