"""Runs evaluations through the ring and writes their results down."""

import time
from collections.abc import Callable

from beamline.coordinator.core import Core
from beamline.coordinator.cursor import Problems
from beamline.coordinator.doctor.keep import NUM_GROUPS, SampleKeeper
from beamline.coordinator.eval_dumps import Completion
from beamline.coordinator.evaluation import Evaluation, eval_groups
from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.protocol.config import EvalSet
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import EvalResult, GroupFailed, ScoredGroup
from beamline.runtime.blob_store import BlobStore

type RecordEval = Callable[[EvalResult, list[Completion]], None]
type ProblemsByName = dict[str, Problems]


class Evaluator:
    """All eval sets of a run.

    Args:
        core: the coordinator's shared part.
        sets: each configured set with its problems by metric name.
        record: takes each result with its completions.
        keeper: takes a few groups of each evaluation, for the doctor.

    Raises:
        ConfigError: two sets under one name.
    """

    def __init__(
        self,
        core: Core,
        sets: list[tuple[EvalSet, ProblemsByName]],
        record: RecordEval,
        keeper: SampleKeeper | None = None,
    ) -> None:
        names = [name for _, problems in sets for name in problems]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"data.evals: {names.count(name)} sets are recorded as eval/{name}/*: give each a name of its own"
                )
        self.names = names
        """As results are recorded."""
        self._core = core
        self._sets = sets
        self._record = record
        self._keeper = keeper
        self._running: list[Evaluation] = []

    async def evaluate(self, step: int) -> dict[str, float]:
        """Sample, grade and record every set under the present policy. Returns `eval/<name>/<metric>` values."""
        self._running = [evaluation for sets in self._sets for evaluation in self._begin(step, *sets)]
        for evaluation in self._running:
            for group in evaluation.waiting():
                await self._core.bus.publish(group)
        await self._core.pulse.when(
            lambda: all(evaluation.complete for evaluation in self._running),
            lambda: f"{sum(e.num_waiting for e in self._running)} problems of the evaluation at step {step}",
            self._core.config.coordinator.step_deadline_s,
            on=("rollout", "reward"),
        )
        return await self._finish(step)

    def progress(self) -> tuple[int, int]:
        """Problems of the evaluation under way that are answered, and all of them; 0 and 0 where there is none."""
        num_problems = sum(len(evaluation.prompts) for evaluation in self._running)
        return num_problems - sum(evaluation.num_waiting for evaluation in self._running), num_problems

    async def take(self, result: ScoredGroup | GroupFailed) -> None:
        """A result from the ring; one that no running evaluation awaits is dropped with its blobs."""
        owner = next((e for e in self._running if e.owns(result.group_id)), None)
        if owner is None:
            await self._core.release([result.group_id])
            return
        retry = owner.record(result)
        if retry is not None:
            await self._core.bus.publish(retry)

    def _begin(self, step: int, eval_set: EvalSet, problems: ProblemsByName) -> list[Evaluation]:
        config = self._core.config
        # A restarted coordinator must not mistake an earlier boot's groups for its own, nor be deduplicated with them.
        prefix = f"e{self._core.state.boots}-{step:05d}-{self._sets.index((eval_set, problems))}"
        return [
            Evaluation(
                name,
                named.prompts,
                eval_groups(
                    named.prompts,
                    eval_set,
                    config.rollout.sampling,
                    grader=config.reward.grader,
                    environment=config.rollout.environment.name,
                    prefix=f"{prefix}-{number}",
                    policy_version=step,
                    seed=config.run.seed,
                    deadline=time.time() + config.coordinator.step_deadline_s,
                    num_routed=NUM_GROUPS if self._keeper is not None else 0,
                ),
                config.coordinator.max_attempts,
                named.num_dropped,
            )
            for number, (name, named) in enumerate(problems.items())
        ]

    async def _finish(self, step: int) -> dict[str, float]:
        values: dict[str, float] = {}
        await self._keep(step)
        for evaluation in self._running:
            result = evaluation.result(step, self._core.config.run.seed)
            self._record(result, await _completions(evaluation, self._core.blobs))
            await self._core.bus.publish(result)
            await self._core.release(evaluation.group_ids())
            values |= {f"eval/{result.name}/{metric}": value for metric, value in result.values.items()}
        self._running = []
        return values

    async def _keep(self, step: int) -> None:
        """Groups of the first set that is not greedy: greedy tokens tell nothing about log-probabilities."""
        sampled = next((e for e in self._running if e.sampling.temperature > 0 and e.scored), None)
        if self._keeper is not None and sampled is not None:
            await self._keeper.keep(step, sampled.sampling, sampled.scored.values(), self._core.update)


async def _completions(evaluation: Evaluation, blobs: BlobStore) -> list[Completion]:
    """One for each sample, in the order of the problems."""
    completions: list[Completion] = []
    for group_id, scored in sorted(evaluation.scored.items()):
        trajectories = decode_blob(Trajectories, await blobs.get(scored.trajectories))
        for sample, grade in enumerate(scored.grades):
            completions.append(
                Completion(
                    prompt_id=scored.task.prompt_id,
                    sample=sample,
                    prompt=evaluation.prompts[group_id].text,
                    completion=trajectories.texts[sample],
                    ground_truth=scored.task.ground_truth,
                    reward=grade.reward,
                    correct=grade.breakdown.get("acc") == 1.0,
                    pred=grade.pred,
                    why=grade.why,
                    response_length=scored.response_lengths[sample],
                    finish_reason=scored.finish_reasons[sample].value,
                )
            )
    return completions
