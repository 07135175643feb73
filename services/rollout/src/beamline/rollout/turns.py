"""Groups of several turns: the engine samples a turn, the environment answers it, until one of them ends it.

The samples of a group run side by side, each with an environment of its own. What breaks is an environment's own
trajectory: it ends with the finish reason `environment`, has no reward, and the group goes on without it.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable

import msgspec

from beamline.environments.environment import EpisodeTask, Start
from beamline.environments.host import EnvironmentFailed, EnvironmentPool, Episode
from beamline.models.chat import ChatTokenizer
from beamline.protocol.errors import Rejected
from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine import Completion, Sampler
from beamline.rollout.observations import Observations
from beamline.rollout.transcript import Transcript

log = logging.getLogger(__name__)


class Turns:
    """Samples groups whose task names an environment in turns, and others as the engine does.

    Args:
        engine: samples a turn.
        environments: of the run's environment.
        chat: the model's tokenizer and template.
        template_kwargs: with which the run renders its prompts.
        max_turns: a trajectory that has not ended by then is cut off.
    """

    def __init__(
        self,
        engine: Sampler,
        environments: EnvironmentPool,
        chat: ChatTokenizer,
        *,
        template_kwargs: dict[str, str | int | float | bool],
        max_turns: int,
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._chat = chat
        self._template_kwargs = template_kwargs
        self._max_turns = max_turns

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        """As `Sampler`. The response's limit counts what the environment writes too.

        Raises:
            Rejected: as the engine; kind "environment" where no sample ended and at least one environment broke.
        """
        name = group.task.environment
        if not name:
            return await self._engine.generate(group, stop)
        if name != self._environments.name:
            raise Rejected(
                "environment",
                f"group {group.group_id} asks for environment {name!r}, this run's is {self._environments.name!r}",
            )
        stop, failures = stop or asyncio.Event(), list[str]()
        samples = (self._trajectory(group, sample, stop, failures) for sample in range(len(group.seeds)))
        completions = list(await asyncio.gather(*samples))
        ended = any(completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for completion in completions)
        if failures and not ended:
            raise Rejected("environment", f"{failures[0]}; no sample of its group ended, {len(failures)} by this cause")
        return completions

    async def _trajectory(
        self, group: PromptGroup, sample: int, stop: asyncio.Event, failures: list[str]
    ) -> Completion:
        """One sample, whatever becomes of it; an environment's failure is logged and told in `failures`."""
        trajectory = Trajectory(group, sample, self._chat)
        with self._environments.episode(trajectory.task) as episode:
            try:
                reason = await self._play(trajectory, episode, stop)
            except _Stopped:
                reason = FinishReason.ABORT
            except EnvironmentFailed as failed:
                reason = FinishReason.ENVIRONMENT
                failures.append(
                    f"environment {self._environments.name} of group {group.group_id}, sample {sample}, turn "
                    f"{trajectory.transcript.num_turns}: {failed}"
                )
                log.warning("%s; the trajectory has no reward", failures[-1])
        return trajectory.transcript.completion(reason, trajectory.reward)

    async def _play(self, trajectory: "Trajectory", episode: Episode, stop: asyncio.Event) -> FinishReason:
        """Turns until the end; returns what ended it. Raises _Stopped or EnvironmentFailed."""
        start = await _unless(stop, episode.reset())
        trajectory.begin(start)
        observations = Observations(self._chat, start.role, self._template_kwargs)
        for _ in range(self._max_turns):
            if stop.is_set():
                return FinishReason.ABORT
            if trajectory.num_tokens_left <= 0:
                return FinishReason.LENGTH
            (turn,) = await self._engine.generate(trajectory.next_turn(start.stop), stop)
            trajectory.transcript.add(turn)
            if turn.finish_reason is not FinishReason.STOP:
                return turn.finish_reason
            step = await _unless(stop, episode.step(turn.text))
            trajectory.reward += step.reward
            if step.done:
                return FinishReason.STOP
            trajectory.transcript.observe(*observations.after(turn.tokens, step.observation))
        return FinishReason.LENGTH


class Trajectory:
    """One sample of a group in the making.

    Args:
        group: it belongs to.
        sample: its index.
        chat: the model's tokenizer.
    """

    def __init__(self, group: PromptGroup, sample: int, chat: ChatTokenizer) -> None:
        self._group = group
        self._sample = sample
        self._chat = chat
        self.transcript = Transcript(group.prompt_tokens)
        self.reward = 0.0

    @property
    def task(self) -> EpisodeTask:
        task = self._group.task
        return EpisodeTask(
            prompt_id=task.prompt_id,
            data_source=task.data_source,
            prompt=self._chat.decode(self._group.prompt_tokens),
            ground_truth=task.ground_truth,
            seed=self._group.seeds[self._sample],
        )

    @property
    def num_tokens_left(self) -> int:
        """Of the response's limit."""
        return self._group.sampling.max_tokens - self.transcript.num_response_tokens

    def begin(self, start: Start) -> None:
        """Put the first observation behind the prompt. Raises EnvironmentFailed where it leaves no room."""
        tokens = self._chat.encode(start.observation)
        self.transcript.observe(tokens, self._chat.decode(tokens))
        if self.num_tokens_left <= 0:
            raise EnvironmentFailed(
                f"its first observation has {self.transcript.num_response_tokens} tokens, a response at most "
                f"{self._group.sampling.max_tokens}"
            )

    def next_turn(self, stop: list[str]) -> PromptGroup:
        """The group that has the engine sample one turn."""
        sampling = self._group.sampling
        return msgspec.structs.replace(
            self._group,
            prompt_tokens=self.transcript.tokens,
            seeds=[turn_seed(self._group.seeds[self._sample], self.transcript.num_turns)],
            sampling=msgspec.structs.replace(
                sampling, max_tokens=self.num_tokens_left, stop=list(dict.fromkeys([*sampling.stop, *stop]))
            ),
        )


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn, in [0, 2^31); the first turn has the sample's own."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/turn/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class _Stopped(Exception):
    """The trajectory ends here, as it is."""


async def _unless[T](stop: asyncio.Event, answer: Awaitable[T]) -> T:
    """The answer. Raises _Stopped when `stop` is set before it is there."""
    answering, stopping = asyncio.ensure_future(answer), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise _Stopped
        return answering.result()
    finally:
        stopping.cancel()
        if not answering.done():
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
