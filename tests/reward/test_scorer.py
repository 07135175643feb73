"""Groups in, scored groups out: rewards and their breakdown, abstentions, failures, and the same answer twice."""

import asyncio

import msgspec
import pytest

from beamline.protocol import messages as m
from beamline.protocol.errors import Rejected
from beamline.protocol.reward_config import OverlongSection
from beamline.protocol.subjects import Subjects
from beamline.reward.scorer import Scorer, keep_raw, overlong_shaping
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub
from group_messages import group_of


@pytest.fixture
def blobs():
    return MemoryBlobStore()


@pytest.fixture
def make_scorer(start_graders, blobs):
    async def make(*graders, shaping=keep_raw, **settings):
        started = await start_graders(*(graders or ("math_dapo",)), **settings)
        return Scorer(worker="reward-0", graders=started, blobs=blobs, shaping=shaping)

    return make


async def test_a_group_is_scored_and_passed_on(make_scorer, blobs):
    group = await group_of(blobs, ["Answer: 5", "Answer: 6", "dunno"])
    scored = await (await make_scorer()).handle(group)
    assert [grade.reward for grade in scored.grades] == [1.0, -1.0, -1.0]
    assert [grade.pred for grade in scored.grades] == ["5", "6", ""]
    assert scored.grades[0].breakdown == {"raw": 1.0, "overlong_penalty": 0.0, "acc": 1.0}
    assert scored.worker == "reward-0"
    for name in set(group.__struct_fields__) - {"worker"}:
        assert getattr(scored, name) == getattr(group, name), name


async def test_long_responses_are_penalised_after_grading(make_scorer, blobs):
    section = OverlongSection(buffer_tokens=20, factor=0.5)
    scorer = await make_scorer(shaping=overlong_shaping(section, max_response_tokens=100))
    group = await group_of(blobs, ["Answer: 5"] * 4 + ["Answer: 6"], lengths=[80, 90, 100, 101, 100])
    scored = await scorer.handle(group)
    assert [grade.reward for grade in scored.grades] == [1.0, 0.75, 0.5, 0.0, -1.5]
    assert [grade.breakdown["raw"] for grade in scored.grades] == [1.0, 1.0, 1.0, 1.0, -1.0]
    assert [grade.breakdown["acc"] for grade in scored.grades] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert [grade.breakdown["overlong_penalty"] for grade in scored.grades] == [0.0, -0.25, -0.5, -1.0, -0.5]


def test_no_buffer_is_no_penalty():
    assert overlong_shaping(OverlongSection(buffer_tokens=0), max_response_tokens=10)(1.0, 99) == 1.0


async def test_an_abstained_grade_has_no_reward(make_scorer, blobs, planted):
    scorer = await make_scorer(planted)
    group = await group_of(blobs, ["Answer: 5", "crash", "raise", "Answer: 6"], grader=planted)
    scored = await scorer.handle(group)
    assert [grade.reward for grade in scored.grades] == [1.0, None, None, -1.0]
    assert scored.grades[1].breakdown == {}
    assert "SIGABRT" in scored.grades[1].why
    assert "planted" in scored.grades[2].why
    assert [grade.abstention for grade in scored.grades] == ["", "crash", "error", ""]


async def test_an_aborted_trajectory_is_not_graded(make_scorer, blobs):
    reasons = [m.FinishReason.ABORT, m.FinishReason.STOP, m.FinishReason.LENGTH]
    scored = await (await make_scorer()).handle(await group_of(blobs, ["Answer: 5"] * 3, reasons=reasons))
    assert [grade.reward for grade in scored.grades] == [None, 1.0, 1.0]
    assert "aborted" in scored.grades[0].why
    assert scored.grades[0].abstention == "aborted"


async def test_an_abstention_is_told_by_group_sample_and_grader(make_scorer, blobs, planted, caplog):
    scorer = await make_scorer(planted)
    await scorer.handle(await group_of(blobs, ["Answer: 5", "nan"], grader=planted))
    assert f"group g-1, sample 1: grader {planted} abstains: grader raised ValueError: reward=nan" in caplog.text


async def test_a_group_is_graded_by_the_grader_that_it_asks_for(make_scorer, blobs):
    scorer = await make_scorer("math_dapo", "exact", "gsm8k")
    for grader, rewards in [("math_dapo", [-1.0, 1.0]), ("exact", [-1.0, -1.0]), ("gsm8k", [1.0, 1.0])]:
        group = await group_of(blobs, ["#### 5.0", r"Answer: $x=5$"], grader=grader)
        assert [grade.reward for grade in (await scorer.handle(group)).grades] == rewards, grader


async def test_a_ground_truth_that_its_grader_cannot_read_fails_the_group(make_scorer, blobs):
    scorer = await make_scorer("gsm8k")
    failed = await scorer.handle(await group_of(blobs, ["#### 5", "#### 6"], grader="gsm8k", ground_truth="five"))
    assert isinstance(failed, m.GroupFailed)
    assert "ground truth 'five' has no number" in failed.text


async def test_a_group_without_a_verdict_has_failed(make_scorer, blobs, planted):
    scorer = await make_scorer(planted)
    failed = await scorer.handle(await group_of(blobs, ["raise", "exit"], grader=planted))
    assert isinstance(failed, m.GroupFailed)
    assert (failed.kind, failed.service, failed.worker, failed.retryable) == ("abstained", "reward", "reward-0", False)
    assert "all 2 grades abstained" in failed.text
    assert "LookupError" in failed.text


async def test_an_evaluated_group_without_a_verdict_keeps_its_reasons(make_scorer, blobs, planted):
    scorer = await make_scorer(planted)
    group = await group_of(blobs, ["raise"], grader=planted)
    scored = await scorer.handle(msgspec.structs.replace(group, purpose=m.Purpose.EVAL))
    assert [grade.reward for grade in scored.grades] == [None]
    assert "LookupError" in scored.grades[0].why


async def test_a_group_that_cannot_be_graded_is_rejected_by_kind(make_scorer, blobs):
    scorer = await make_scorer()
    group = await group_of(blobs, ["Answer: 5"])
    longer = msgspec.structs.replace(group, response_lengths=[2, 2], finish_reasons=[m.FinishReason.STOP] * 2)
    other = msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, grader="math_verify"))
    renamed = msgspec.structs.replace(group, group_id="g-2")
    for bad, kind, words in [
        (longer, "blob", "g-1 of 2 trajectories refers to a blob with 1"),
        (renamed, "blob", "of group g-1"),
        (other, "grader", "asks for grader 'math_verify', which is none of this run's \\(math_dapo\\)"),
    ]:
        with pytest.raises(Rejected, match=words) as error:
            await scorer.handle(bad)
        assert error.value.kind == kind
    await blobs.release("g-1")
    with pytest.raises(Rejected) as error:
        await scorer.handle(group)
    failed = scorer.on_rejected(group, error.value)
    assert (failed.kind, failed.retryable, failed.group_id) == ("blob", True, "g-1")


@pytest.mark.parametrize("seed", range(5))
async def test_over_a_bus_that_repeats_and_reorders_every_group_is_answered_once_and_alike(make_scorer, blobs, seed):
    hub = MemoryHub(Subjects(prefix="beamline", run="test"), seed=seed, duplicate=0.5)
    bus, scorer = MemoryBus(hub), await make_scorer(workers=2)
    answers: dict[str, list[float | None]] = {}
    complete = asyncio.Event()

    async def collect(message):
        rewards = [grade.reward for grade in message.grades]
        assert answers.setdefault(message.group_id, rewards) == rewards
        if len(answers) == 20:
            complete.set()

    working = [
        asyncio.create_task(bus.work("reward", scorer.handle, concurrency=4, on_rejected=scorer.on_rejected)),
        asyncio.create_task(bus.work("coordinator", collect)),
    ]
    for number in range(20):
        texts = [f"Answer: {number}", "Answer: 5"]
        await bus.publish(await group_of(blobs, texts, group_id=f"g-{number}", ground_truth=str(number)))
    async with asyncio.timeout(20):
        await complete.wait()
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    assert answers == {f"g-{n}": [1.0, 1.0 if n == 5 else -1.0] for n in range(20)}


async def test_what_was_graded_is_counted_by_kind(make_scorer, blobs, planted, is_documented):
    scorer = await make_scorer(planted)
    await scorer.handle(await group_of(blobs, ["Answer: 5", "crash", "raise", "Answer: 6"], grader=planted))
    await scorer.handle(await group_of(blobs, ["crash", "crash"], grader=planted))
    told = scorer.meter.take()
    assert all(map(is_documented, told))
    seconds = told.pop("grading/seconds/reward-0")
    assert seconds > 0
    assert told == {
        "grading/groups/reward-0": 2,
        "grading/graded/reward-0": 2,
        "grading/abstained/crash/reward-0": 3,
        "grading/abstained/error/reward-0": 1,
    }
    assert set(scorer.meter.take().values()) == {0}
