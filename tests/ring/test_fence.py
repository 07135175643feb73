"""Policies on their way into two rollout workers of which one has trouble: the run goes on, and loses no group.

Deadlines are short and real; everything else passes in turns of the event loop.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from beamline.coordinator.control import Control
from beamline.protocol.codec import decode_as
from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import Fence
from ring_run import RING_DEADLINE_S, Ring, check
from scripted_rollout import SILENT, Trouble
from scripted_services import Mishaps

DEADLINE_S = 0.5
NUM_STEPS = 3


def configure(placement: Placement, replicas: int, deadline_s: float) -> RunConfig:
    settings: dict[str, Any] = {
        "run": {"name": "ring", "placement": placement},
        "coordinator": {
            "start_deadline_s": RING_DEADLINE_S,
            "step_deadline_s": RING_DEADLINE_S,
            "lease_deadline_s": deadline_s,
        },
        "rollout": {
            "replicas": replicas,
            "sampling": {"groups_per_step": 4, "samples_per_group": 2, "max_response_tokens": 8},
        },
        "trainer": {"num_steps": NUM_STEPS, "eval_interval": 0},
        "weights": {"deadline_s": deadline_s, "attempts": 2},
    }
    return msgspec.convert(settings, RunConfig)


class FencedRing(Ring):
    """Two workers, of which `trouble` is the second's, and nothing else that goes wrong."""

    def __init__(
        self,
        run_dir: Path,
        trouble: Trouble | Mapping[int, Trouble],
        *,
        placement: Placement = Placement.DISAGGREGATED,
        replicas: int = 2,
        deadline_s: float = RING_DEADLINE_S,
    ) -> None:
        troubles = trouble if isinstance(trouble, Mapping) else {1: trouble}
        config = configure(placement, replicas, deadline_s)
        super().__init__(7, run_dir, config=config, mishaps=Mishaps(), troubles=troubles, num_kills=0)
        self._fences = self.hub.listen(self.bus.subjects.fence)

    @property
    def fences(self) -> list[tuple[int, int, bool]]:
        """Version, attempt and whether it was open, of all that were published since the last look."""
        messages = [self._fences.get_nowait().payload for _ in range(self._fences.qsize())]
        fences = [decode_as(Fence, message) for message in messages]
        return [(fence.policy_version, fence.attempt, fence.is_open) for fence in fences]

    async def until_version(self, policy_version: int) -> None:
        """Turns of the event loop, until the coordinator has heard of that policy."""
        while self.core.update is None or self.core.update.policy_version < policy_version:
            await asyncio.sleep(0)


def at(stage: str, version: int, *attempts: int, trouble: str = "a checksum differs") -> Trouble:
    """Trouble at that one point."""

    def decide(now: str, of: int, attempt: int) -> str:
        return trouble if now == stage and of == version and attempt in attempts else ""

    return decide


def left_out(steps: list[dict[str, float]]) -> list[float]:
    return [values["sync/left_out"] for values in steps]


def test_policies_go_through_one_after_the_other(tmp_path: Path):
    ring = FencedRing(tmp_path, {})
    asyncio.run(ring.run())
    steps = check(ring)
    assert ring.fences == [(version, 1, True) for version in range(NUM_STEPS + 1)]
    for values in steps:
        assert values["sync/num_bytes"] == 200.0 and values["sync/left_out"] == 0.0
        assert values["sync/prepare_s/rollout-1"] == 0.25
        assert values.get("sync/load_s/rollout-0", 0.5) == 0.5, "absent where a heartbeat was faster than the report"


def test_a_staging_that_fails_once_is_tried_again(tmp_path: Path):
    ring = FencedRing(tmp_path, at("prepare", 2, 1))
    asyncio.run(ring.run())
    assert left_out(check(ring)) == [0.0, 0.0, 0.0]
    assert [fence for fence in ring.fences if fence[0] == 2] == [(2, 2, False), (2, 2, True)]


@pytest.mark.parametrize("placement", list(Placement))
def test_a_staging_that_always_fails_leaves_the_worker_out_until_the_next_policy(tmp_path: Path, placement: Placement):
    ring = FencedRing(tmp_path, at("prepare", 2, 1, 2), placement=placement)
    told: dict[str, str] = {}

    async def run() -> None:
        running = asyncio.create_task(ring.run())
        while not running.done() and not told:
            await asyncio.sleep(0)
            if hasattr(ring, "core") and ring.core.roster.left_out():
                told.update({w.worker: w.waiting_for for w in Control(ring.core, ring.lease).status().workers})
        await running

    asyncio.run(run())
    assert left_out(check(ring)) == [0.0, 1.0, 0.0]
    assert told["rollout-1"] == "left out of policy 2: a checksum differs" and told["rollout-0"] == ""
    assert [worker.version for worker in ring.rollouts] == [NUM_STEPS, NUM_STEPS], "it is back with policy 3"


def test_a_canary_that_disagrees_once_gets_another_try_and_the_other_worker_none(tmp_path: Path):
    ring = FencedRing(tmp_path, at("load", 2, 1, trouble="the canary differs"))
    asyncio.run(ring.run())
    assert left_out(check(ring)) == [0.0, 0.0, 0.0]
    assert [fence for fence in ring.fences if fence[0] == 2] == [(2, 1, True), (2, 2, True)]


def test_a_canary_that_always_disagrees_leaves_the_worker_out(tmp_path: Path):
    ring = FencedRing(tmp_path, at("load", 2, 1, 2, trouble="the canary differs"))
    asyncio.run(ring.run())
    assert left_out(check(ring)) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("stage", ["prepare", "load"])
def test_a_worker_that_never_answers_is_waited_for_until_the_deadline(tmp_path: Path, stage: str):
    ring = FencedRing(tmp_path, at(stage, 2, 1, trouble=SILENT), deadline_s=DEADLINE_S)
    asyncio.run(ring.run())
    steps = check(ring)
    assert left_out(steps) == [0.0, 1.0, 1.0], "it hangs for good"
    assert DEADLINE_S <= steps[1]["timing/sync"] < 20 * DEADLINE_S


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_worker_that_dies_between_prepared_and_loaded_is_left_out_or_comes_back(tmp_path: Path, is_restarted: bool):
    ring = FencedRing(
        tmp_path, at("load", 2, 1, trouble=SILENT), deadline_s=RING_DEADLINE_S if is_restarted else DEADLINE_S
    )
    ring.troubles = {}  # of the process that is started in its place

    async def run() -> None:
        running = asyncio.create_task(ring.run())
        worker = ring.rollouts[1]
        while not (worker.prepared == 2 and worker.due == 2):
            await asyncio.sleep(0)
        if is_restarted:
            await ring.restart_rollout(1)
        else:
            await worker.kill()
        await running

    asyncio.run(run())
    steps = check(ring)
    assert ring.rollouts[0].version == NUM_STEPS
    if is_restarted:
        assert steps[1]["timing/sync"] < RING_DEADLINE_S, "nobody waits for the dead"
        assert ring.rollouts[1].version == NUM_STEPS and left_out(steps)[2] == 0.0
    else:
        assert left_out(steps) == [0.0, 1.0, 1.0]


def test_the_only_worker_may_die_between_prepared_and_loaded(tmp_path: Path):
    ring = FencedRing(tmp_path, {0: at("load", 2, 1, trouble=SILENT)}, replicas=1)
    ring.troubles = {}

    async def run() -> None:
        running = asyncio.create_task(ring.run())
        while ring.rollouts[0].due < 2:
            await asyncio.sleep(0)
        await ring.restart_rollout(0)
        await running

    asyncio.run(run())
    assert left_out(check(ring)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("stage", "version"), [("prepare", 0), ("prepare", 2), ("load", 2)])
def test_a_policy_that_nobody_can_serve_ends_the_run_with_all_reasons(tmp_path: Path, stage: str, version: int):
    troubles = {number: at(stage, version, 1, 2, trouble=f"no {stage} by {number}") for number in (0, 1)}
    ring = FencedRing(tmp_path, troubles)
    with pytest.raises(BeamlineError) as ended:
        asyncio.run(ring.run())
    for number in (0, 1):
        assert f"'rollout-{number}': 'no {stage} by {number}'" in str(ended.value)
    assert f"no rollout worker could {stage} policy {version}" in str(ended.value)


def test_a_policy_that_nobody_answers_for_ends_the_run_after_the_deadline(tmp_path: Path):
    ring = FencedRing(
        tmp_path, {number: at("prepare", 1, 1, trouble=SILENT) for number in (0, 1)}, deadline_s=DEADLINE_S
    )
    with pytest.raises(BeamlineError, match=r"policy 1: .*'rollout-1': 'it did not prepare it within weights"):
        asyncio.run(ring.run())


@pytest.mark.parametrize("num_turns", range(48))  # undisturbed it takes 41, with a fence for the second attempt at 9
def test_a_coordinator_may_be_killed_at_every_point_of_the_fence(tmp_path: Path, num_turns: int):
    ring = FencedRing(tmp_path, at("prepare", 2, 1))

    async def run() -> None:
        for worker in (ring.trainer, ring.reward, *ring.rollouts):
            worker.start()
        coordinator = asyncio.create_task(ring.coordinate())
        try:
            await asyncio.sleep(0)
            await ring.until_version(2)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            coordinator.cancel()
            await asyncio.gather(coordinator, return_exceptions=True)
            async with asyncio.timeout(RING_DEADLINE_S):
                await ring.coordinate()
        finally:
            coordinator.cancel()
            for worker in (ring.trainer, ring.reward, *ring.rollouts):
                await worker.kill()

    asyncio.run(run())
    check(ring)
    assert ring.core.roster.left_out() == {} and [worker.version for worker in ring.rollouts] == [NUM_STEPS] * 2
    fences = [fence for fence in ring.fences if fence[0] == 2]
    assert [attempt for _, attempt, _ in fences] == sorted(attempt for _, attempt, _ in fences)
    assert fences[-1][2], "it was opened in the end"


@pytest.mark.parametrize(
    ("trouble", "match"),
    [
        (SILENT, r"waited 0\.5 s for rollout-1 to release .* rollout-1: no report, .*trainer-0 waits"),
        (
            "it stays",
            r"rollout-1 kept device memory that trainer needs.* kept 64\.0 MiB.*trainer-0 waits",
        ),
    ],
)
def test_a_lease_that_is_not_honoured_stops_the_step(tmp_path: Path, trouble: str, match: str):
    ring = FencedRing(
        tmp_path, at("release", 1, 1, trouble=trouble), placement=Placement.COLOCATED, deadline_s=DEADLINE_S
    )
    with pytest.raises(BeamlineError, match=match):
        asyncio.run(ring.run())
    assert ring.witness.trained_steps == [1], "step 2 was not begun"
