"""What an environment gave a trajectory is part of its reward; one whose environment broke has none."""

from beamline.protocol import messages as m
from beamline.protocol.reward_config import OverlongSection
from beamline.reward.scorer import Scorer, overlong_shaping
from beamline.runtime.memory_blobs import MemoryBlobStore
from group_messages import group_of

STOP, LENGTH, BROKEN = m.FinishReason.STOP, m.FinishReason.LENGTH, m.FinishReason.ENVIRONMENT


async def test_rewards_add_up_before_they_are_shaped(start_graders):
    blobs = MemoryBlobStore()
    shaping = overlong_shaping(OverlongSection(buffer_tokens=20, factor=0.5), max_response_tokens=100)
    scorer = Scorer(worker="reward-0", graders=await start_graders("math_dapo"), blobs=blobs, shaping=shaping)
    group = await group_of(
        blobs,
        ["7-2=5\nAnswer: 5", "Answer: 6", "Answer: 5"],
        lengths=[10, 90, 10],
        reasons=[STOP, LENGTH, BROKEN],
        environment_rewards=[0.5, -0.25, 0.75],
    )
    right, wrong, broken = (await scorer.handle(group)).grades
    assert (right.reward, right.breakdown) == (
        1.5,
        {"raw": 1.5, "overlong_penalty": 0.0, "acc": 1.0, "environment": 0.5},
    )
    assert (wrong.reward, wrong.breakdown["raw"], wrong.breakdown["environment"]) == (-1.5, -1.25, -0.25)
    assert (broken.reward, broken.breakdown, broken.abstention) == (None, {}, "environment")
    assert "its environment broke" in broken.why


async def test_a_group_without_an_environment_says_nothing_of_one(start_graders):
    blobs = MemoryBlobStore()
    scorer = Scorer(worker="reward-0", graders=await start_graders("math_dapo"), blobs=blobs)
    (grade,) = (await scorer.handle(await group_of(blobs, ["Answer: 5"]))).grades
    assert "environment" not in grade.breakdown
