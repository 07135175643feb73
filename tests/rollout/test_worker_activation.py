"""Activating a policy: its canary, the way back to the one before, and what becomes of samples under way."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, VersionSpan, decode_blob
from beamline.protocol.errors import Retryable
from beamline.protocol.weights_config import WeightsSection
from beamline.rollout.activation import pause_of
from beamline.rollout.engine import EngineError, Pause, Scored
from beamline.rollout.fake_engine import FakeEngine
from rollout_bench import Bench, Turns, closed, opened
from rollout_messages import prompt_group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


class Gates:
    """Holds up what an engine does with chosen policies until the test lets it go on."""

    def __init__(self, what: str, version: int) -> None:
        self._held = (what, version)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, what: str, version: int) -> None:
        if (what, version) == self._held:
            self.begun.set()
            await self.go_on.wait()


async def test_a_policy_whose_canary_disagrees_is_refused_and_the_old_one_is_put_back(folder: Path):
    bench = Bench(FakeEngine(drifted={1}), folder)
    await bench.update(0)
    refused = await bench.update(1)
    assert refused.canary_gap == pytest.approx(0.5)
    assert "policy 1 is refused" in refused.error and "policy 0 is served on" in refused.error
    assert (bench.status.policy_version, bench.engine.policy_version) == (0, 0) and not await bench.is_open()
    assert bench.status.waiting_for.startswith("a policy after 1: policy 1 is refused")
    with pytest.raises(Retryable, match="policy 1"):
        await bench.worker.handle(prompt_group([4], seeds=[1], min_policy_version=1))
    assert (await bench.update(2)).error == "" and bench.status.policy_version == 2 and await bench.is_open()


async def test_a_refused_policy_is_fetched_and_activated_again_when_its_fence_opens_again(folder: Path):
    bench = Bench(FakeEngine(drifted={1}), folder)
    await bench.update(0)
    await bench.update(1)
    await bench.hear(opened(1, 2))
    assert not await bench.is_open(), "it is as wrong as before"
    bench.engine.drifted = {}
    loaded = (await bench.hear(opened(1, 3)))[-1]
    assert isinstance(loaded, m.PolicyLoaded) and (loaded.attempt, loaded.error) == (3, "")
    assert bench.status.policy_version == 1 and await bench.is_open()


@pytest.mark.parametrize("exact", [True, False])
async def test_one_token_sent_to_other_experts_is_forgiven_in_a_lower_precision_alone(folder: Path, exact: bool):
    bench = Bench(FakeEngine(), folder, exact=exact)
    update = await bench.exported(0)
    logprobs = list(update.canary.logprobs)
    logprobs[1] -= 2.0
    canary = m.Canary(tokens=update.canary.tokens, logprobs=logprobs)
    loaded = await bench.serve(msgspec.structs.replace(update, canary=canary))
    assert bool(loaded.error) is exact


@pytest.mark.parametrize(
    ("canary", "words"),
    [
        (m.Canary(tokens=[5, 9, 30, 7], logprobs=[-1.0, math.nan, -1.0]), "by inf"),
        (m.Canary(tokens=[5, 9], logprobs=[-1.0, -1.0]), "its canary has 2 tokens and 2 log-probabilities"),
        (m.Canary(tokens=[5], logprobs=[]), "its canary has 1 tokens and 0 log-probabilities"),
    ],
    ids=["not a number", "too long", "empty"],
)
async def test_a_canary_that_checks_nothing_is_refused(folder: Path, canary: m.Canary, words: str):
    bench = Bench(FakeEngine(), folder, exact=False)
    loaded = await bench.serve(msgspec.structs.replace(await bench.exported(0), canary=canary))
    assert words in loaded.error and not await bench.is_open()


async def test_nothing_is_served_where_the_old_weights_cannot_be_put_back(folder: Path):
    first = Bench(FakeEngine(drifted={0}), folder)
    assert "no policy is served before it" in (await first.update(0)).error
    assert first.status.policy_version == -1 and not await first.is_open()
    bench = Bench(FakeEngine(drifted={1}), folder)
    await bench.update(0)
    bench.engine.damaged = {0}
    assert "policy 0 cannot be put back, so that none is served" in (await bench.update(1)).error
    assert bench.status.policy_version == -1 and not await bench.is_open()
    assert "refused" in bench.status.waiting_for
    assert (await bench.update(2)).error == "" and await bench.is_open()


async def test_an_old_policy_whose_canary_disagrees_now_is_not_served_either(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    bench.engine.drifted = {0, 1}
    error = (await bench.update(1)).error
    assert "policy 0 cannot be put back" in error and error.count("a log-probability of the canary differs") == 2
    assert bench.status.policy_version == -1 and not await bench.is_open()


async def test_an_activation_that_takes_too_long_is_given_up_and_the_old_policy_put_back(folder: Path):
    bench = Bench(FakeEngine(delay=Gates("activate", 1)), folder, deadline_s=0.02)
    await bench.update(0)
    loaded = await bench.update(1)
    assert "waited 0.02 s for policy 1 to be activated (weights.pause: keep) (weights.deadline_s)" in loaded.error
    assert "policy 0 is served on" in loaded.error and bench.engine.policy_version == 0
    assert (await bench.update(2)).error == ""


async def test_an_engine_that_breaks_ends_the_process(folder: Path):
    async def breaks(what: str, version: int) -> None:
        if version:
            raise EngineError(f"broke in {what}")

    for heard in ([], [opened(1)]):
        bench = Bench(FakeEngine(), folder)
        await bench.update(0)
        update = await bench.exported(1)
        if heard:
            await bench.hear(update)
        bench.engine.delay = breaks
        with pytest.raises(EngineError, match=r"^broke in (stage|activate)$"):
            await bench.hear(*heard or [update])


async def test_a_group_that_sampled_from_a_refused_policy_fails_and_may_be_tried_again(folder: Path):
    turns = Turns()
    gates = Gates("stage", 0)
    bench = Bench(FakeEngine(drifted={1}, wait=turns.wait), folder)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3], max_tokens=64)))
    (await turns.next()).set_result(None)
    token = await turns.next()
    bench.engine.delay = gates
    updating = asyncio.create_task(bench.update(1))
    await gates.begun.wait()
    token.set_result(None)  # sampled from the refused policy, before the old one is back
    token = await turns.next()
    gates.go_on.set()
    await updating
    bench.engine.drifted = {}
    await bench.hear(opened(1, 2))
    assert bench.status.policy_version == 1, "the same version, with the right weights now, does not hide it"
    token.set_result(None)
    answer = await turns.finish(sampling)
    assert isinstance(answer, m.GroupFailed) and (answer.kind, answer.retryable) == ("policy", True)


@pytest.mark.parametrize("drifted", [False, True])
async def test_a_group_that_ends_while_its_policy_is_on_trial_waits_for_the_verdict(folder: Path, drifted: bool):
    begun, go_on = asyncio.Event(), asyncio.Event()

    class SlowlyScoring(FakeEngine):
        async def score(self, tokens: Sequence[int], policy: Scored = "served") -> list[float]:
            if self.policy_version == 1:
                begun.set()
                await go_on.wait()
            return await super().score(tokens, policy)

    bench = Bench(SlowlyScoring(drifted={1} if drifted else ()), folder)
    await bench.update(0)
    updating = asyncio.create_task(bench.update(1))
    await begun.wait()
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3])))
    done, _ = await asyncio.wait({sampling}, timeout=0.02)
    assert not done
    go_on.set()
    await updating
    answer = await sampling
    assert isinstance(answer, m.GroupFailed if drifted else m.TrajectoryGroup)


async def test_a_group_under_way_beside_a_refused_policy_is_kept_if_none_of_its_tokens_came_from_it(folder: Path):
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench = Bench(FakeEngine(drifted={1}, wait=lambda: turn), folder)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[1])))
    await asyncio.sleep(0)
    await bench.update(1)
    turn.set_result(None)
    answer = await sampling
    assert isinstance(answer, m.TrajectoryGroup) and answer.max_policy_version == 0


@pytest.mark.parametrize("pause", ["keep", "continue"])
async def test_samples_under_way_go_on_under_the_new_policy(folder: Path, pause: Pause):
    turns = Turns()
    bench = Bench(FakeEngine(wait=turns.wait), folder, pause=pause)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3], max_tokens=64)))
    (await turns.next()).set_result(None)
    second = await turns.next()
    await bench.update(1)
    second.set_result(None)
    answer = await turns.finish(sampling)
    assert isinstance(answer, m.TrajectoryGroup)
    assert (answer.min_policy_version, answer.max_policy_version) == (0, 1)
    blob = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    assert blob.version_spans == [[VersionSpan(0, 0, 1), VersionSpan(1, 1, answer.response_lengths[0])]]


async def test_samples_under_way_end_first_where_they_are_drained(folder: Path):
    turns = Turns()
    bench = Bench(FakeEngine(wait=turns.wait), folder, pause="drain")
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3], max_tokens=64)))
    (await turns.next()).set_result(None)
    updating = asyncio.create_task(bench.update(1))
    answer = await turns.finish(sampling)
    assert isinstance(answer, m.TrajectoryGroup) and answer.max_policy_version == 0
    assert (await updating).error == "" and bench.status.policy_version == 1


async def test_a_group_whose_samples_a_new_policy_cut_off_is_to_be_sampled_anew(folder: Path):
    turns = Turns()
    bench = Bench(FakeEngine(wait=turns.wait), folder, pause="abort")
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3, 4], max_tokens=64)))
    (await turns.next()).set_result(None)
    await bench.update(1)
    answer = await sampling
    assert isinstance(answer, m.GroupFailed)
    assert (answer.kind, answer.retryable, answer.service) == ("policy_update", True, "rollout")
    assert "cut off 2 of its 2 samples" in answer.text and bench.status.in_flight == 0


async def test_a_policy_is_activated_while_memory_is_released_whatever_is_under_way(folder: Path):
    for pause in ("keep", "drain", "abort", "continue"):
        turns = Turns()
        bench = Bench(FakeEngine(wait=turns.wait), folder, pause=pause)
        await bench.update(0)
        await bench.engine.release_memory()
        sampling = asyncio.create_task(bench.worker.handle(prompt_group([4], seeds=[3])))
        (await turns.next()).set_result(None)
        assert (await bench.update(1)).error == "", pause
        await bench.engine.restore_memory()
        assert isinstance(await turns.finish(sampling), m.GroupFailed if pause == "abort" else m.TrajectoryGroup)


async def test_closing_a_fence_again_leaves_a_served_policy_alone(folder: Path):
    bench = Bench(FakeEngine(), folder)
    await bench.update(1)
    await bench.hear(closed(1, 1))
    assert await bench.is_open() and bench.engine.num_staged == 1


def test_what_the_configuration_calls_abort_continues_or_drops():
    words = [
        pause_of(WeightsSection(pause=pause, aborted=aborted))
        for pause in ("keep", "drain", "abort")
        for aborted in ("continue", "drop")
    ]
    assert words == ["keep", "keep", "drain", "drain", "continue", "abort"]
