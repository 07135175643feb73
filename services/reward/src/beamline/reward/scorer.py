"""The reward service's work: a trajectory group in, a scored group out.

A trajectory's reward is the grader's and its environment's, then shaped by length where the run asks for it. One
without a verdict abstains; it has no reward, which is not a reward of zero. A group in which all abstain has failed,
unless it is evaluated: an evaluation counts abstentions and shows them.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

from beamline.algorithms.shaping import overlong
from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.protocol.errors import BlobError, Rejected
from beamline.protocol.messages import FinishReason, Grade, GroupFailed, Message, Purpose, ScoredGroup, TrajectoryGroup
from beamline.protocol.reward_config import OverlongSection
from beamline.reward.frames import Abstained, Outcome
from beamline.reward.meter import GradingMeter
from beamline.reward.pool import Graders
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.waits import waiting

type Shaping = Callable[[float, int], float]
"""(raw reward, tokens of the response) -> reward."""

log = logging.getLogger(__name__)

UNGRADED = {
    FinishReason.ABORT: Abstained("aborted", "the trajectory was aborted before it ended"),
    FinishReason.ENVIRONMENT: Abstained("environment", "its environment broke; the log of rollout says how"),
}


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
        graders: the run's, started.
        blobs: where trajectories lie.
        shaping: of the raw rewards.
    """

    def __init__(self, *, worker: str, graders: Graders, blobs: BlobStore, shaping: Shaping = keep_raw) -> None:
        self._worker = worker
        self._graders = graders
        self._blobs = blobs
        self._shaping = shaping
        self.meter = GradingMeter(worker)

    async def handle(self, group: Message) -> ScoredGroup | GroupFailed:
        """Grade a TrajectoryGroup; the same group always gets the same grades.

        Raises:
            Rejected: the group's blob is missing, damaged or another group's, or it asks for a grader that the run does
                not have.
        """
        assert isinstance(group, TrajectoryGroup), f"{type(group).__name__} does not belong on the queue of reward"
        started = time.monotonic()
        trajectories = await self._read(group)
        outcomes = await self._grade(group, trajectories.texts)
        self.meter.add(outcomes, score_s := time.monotonic() - started)
        if group.purpose is Purpose.TRAIN and all(isinstance(outcome, Abstained) for outcome in outcomes):
            return self._failed(group, "abstained", _reasons(outcomes), retryable=False)
        given = trajectories.environment_rewards or [None] * len(outcomes)
        grades = [self._shape(*row) for row in zip(outcomes, given, group.response_lengths, strict=True)]
        return self._scored(group, grades, score_s)

    def on_rejected(self, message: Message, error: Rejected) -> GroupFailed:
        """The failure to publish for a group that cannot be graded; a lost blob is worth another try."""
        assert isinstance(message, TrajectoryGroup)
        return self._failed(message, error.kind, str(error), retryable=error.kind == "blob")

    async def _read(self, group: TrajectoryGroup) -> Trajectories:
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
        return trajectories

    async def _grade(self, group: TrajectoryGroup, texts: list[str]) -> list[Outcome]:
        """One outcome a trajectory; those that did not end by themselves or at a limit abstain ungraded."""
        task, graders = group.task, self._graders
        if task.grader not in graders.names:
            raise Rejected(
                "grader",
                f"group {group.group_id} asks for grader {task.grader!r}, which is none of this run's "
                f"({', '.join(graders.names)}): name it in reward.grader or in an evaluation's",
            )
        whole = [reason not in UNGRADED for reason in group.finish_reasons]
        chosen = [text for text, is_whole in zip(texts, whole, strict=True) if is_whole]
        with waiting(f"{len(chosen)} texts of group {group.group_id} to be graded by {task.grader}"):
            graded = iter(await graders.grade(task.grader, chosen, task.ground_truth))
        outcomes = [UNGRADED.get(reason) or next(graded) for reason in group.finish_reasons]
        for sample, outcome in enumerate(outcomes):
            if isinstance(outcome, Abstained):
                log.warning(
                    "group %s, sample %d: grader %s abstains: %s", group.group_id, sample, task.grader, outcome.why
                )
        return outcomes

    def _shape(self, outcome: Outcome, environment: float | None, num_tokens: int) -> Grade:
        if isinstance(outcome, Abstained):
            return Grade(reward=None, breakdown={}, why=outcome.why, abstention=outcome.kind)
        raw = outcome.reward + (environment or 0.0)
        reward = self._shaping(raw, num_tokens)
        breakdown = {"raw": raw, "overlong_penalty": reward - raw, "acc": outcome.acc}
        if environment is not None:
            breakdown["environment"] = environment
        return Grade(reward=reward, breakdown=breakdown, pred=outcome.pred, why=outcome.why)

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
