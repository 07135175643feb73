"""The reward service's work: a trajectory group in, a scored group out.

A trajectory's reward is the grader's, then shaped by length where the run asks for it. One without a verdict abstains;
it has no reward, which is not a reward of zero. A group in which all abstain has failed, unless it is evaluated: an
evaluation counts abstentions and shows them.
"""

import time
from collections.abc import Callable
from functools import partial

from beamline.algorithms.shaping import overlong
from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.protocol.errors import BlobError, Rejected
from beamline.protocol.messages import FinishReason, Grade, GroupFailed, Message, Purpose, ScoredGroup, TrajectoryGroup
from beamline.protocol.reward_config import OverlongSection
from beamline.reward.frames import Abstained, Outcome
from beamline.reward.pool import GraderPool
from beamline.runtime.blob_store import BlobStore

type Shaping = Callable[[float, int], float]
"""(raw reward, tokens of the response) -> reward."""

ABORTED = Abstained("the trajectory was aborted before it ended")


def keep_raw(reward: float, num_tokens: int) -> float:
    """The shaping of a run without an overlong penalty."""
    return reward


def overlong_shaping(section: OverlongSection, max_response_tokens: int) -> Shaping:
    """The shaping that a recipe asks for."""
    if section.buffer_tokens == 0:
        return keep_raw
    return partial(overlong, max_tokens=max_response_tokens, buffer_tokens=section.buffer_tokens, factor=section.factor)


class Scorer:
    """Grades groups.

    Args:
        worker: its name in messages.
        pool: started, with the run's grader.
        blobs: where trajectories lie.
        shaping: of the raw rewards.
    """

    def __init__(self, *, worker: str, pool: GraderPool, blobs: BlobStore, shaping: Shaping = keep_raw) -> None:
        self._worker = worker
        self._pool = pool
        self._blobs = blobs
        self._shaping = shaping

    async def handle(self, group: Message) -> ScoredGroup | GroupFailed:
        """Grade a TrajectoryGroup; the same group always gets the same grades.

        Raises:
            Rejected: the group's blob is missing, damaged or another group's, or it asks for another grader.
        """
        assert isinstance(group, TrajectoryGroup), f"{type(group).__name__} does not belong on the queue of reward"
        started = time.monotonic()
        texts = await self._read_texts(group)
        outcomes = await self._grade(group, texts)
        if group.purpose is Purpose.TRAIN and all(isinstance(outcome, Abstained) for outcome in outcomes):
            return self._failed(group, "abstained", _reasons(outcomes), retryable=False)
        grades = [self._shape(*pair) for pair in zip(outcomes, group.response_lengths, strict=True)]
        return self._scored(group, grades, time.monotonic() - started)

    def on_rejected(self, message: Message, error: Rejected) -> GroupFailed:
        """The failure to publish for a group that cannot be graded; a lost blob is worth another try."""
        assert isinstance(message, TrajectoryGroup)
        return self._failed(message, error.kind, str(error), retryable=error.kind == "blob")

    async def _read_texts(self, group: TrajectoryGroup) -> list[str]:
        try:
            trajectories = decode_blob(Trajectories, await self._blobs.get(group.trajectories))
        except BlobError as error:
            raise Rejected("blob", str(error)) from error
        num_expected = len(group.response_lengths)
        if trajectories.group_id != group.group_id or trajectories.num_trajectories != num_expected:
            raise Rejected(
                "blob",
                f"group {group.group_id} of {num_expected} trajectories refers to a blob with "
                f"{trajectories.num_trajectories} of group {trajectories.group_id}",
            )
        return trajectories.texts

    async def _grade(self, group: TrajectoryGroup, texts: list[str]) -> list[Outcome]:
        """One outcome a trajectory; aborted ones abstain ungraded."""
        if group.task.grader != self._pool.grader:
            raise Rejected(
                "grader",
                f"group {group.group_id} asks for grader {group.task.grader!r}, this run's is {self._pool.grader!r}",
            )
        whole = [reason is not FinishReason.ABORT for reason in group.finish_reasons]
        graded = iter(
            await self._pool.grade([t for t, w in zip(texts, whole, strict=True) if w], group.task.ground_truth)
        )
        return [next(graded) if w else ABORTED for w in whole]

    def _shape(self, outcome: Outcome, num_tokens: int) -> Grade:
        if isinstance(outcome, Abstained):
            return Grade(reward=None, breakdown={}, why=outcome.why)
        reward = self._shaping(outcome.reward, num_tokens)
        breakdown = {"raw": outcome.reward, "overlong_penalty": reward - outcome.reward, "acc": outcome.acc}
        return Grade(reward=reward, breakdown=breakdown, pred=outcome.pred)

    def _scored(self, group: TrajectoryGroup, grades: list[Grade], score_s: float) -> ScoredGroup:
        return ScoredGroup(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            task=group.task,
            worker=self._worker,
            trajectories=group.trajectories,
            routed_experts=group.routed_experts,
            num_prompt_tokens=group.num_prompt_tokens,
            response_lengths=group.response_lengths,
            finish_reasons=group.finish_reasons,
            min_policy_version=group.min_policy_version,
            max_policy_version=group.max_policy_version,
            grades=grades,
            generate_s=group.generate_s,
            score_s=score_s,
        )

    def _failed(self, group: TrajectoryGroup, kind: str, text: str, *, retryable: bool) -> GroupFailed:
        return GroupFailed(
            group_id=group.group_id,
            attempt=group.attempt,
            purpose=group.purpose,
            service="reward",
            worker=self._worker,
            kind=kind,
            text=text,
            retryable=retryable,
        )


def _reasons(outcomes: list[Outcome]) -> str:
    reasons = {outcome.why for outcome in outcomes if isinstance(outcome, Abstained)}
    return f"all {len(outcomes)} grades abstained: " + "; ".join(sorted(reasons)[:3])
