"""A rollout worker, and an engine that waits for its turn."""

import asyncio
from pathlib import Path

import numpy as np

from beamline.models.routing import RoutingShape
from beamline.protocol import messages as m
from beamline.rollout.activation import Activation
from beamline.rollout.engine import Engine, Pause, Sampler
from beamline.rollout.fake_engine import token_logprob
from beamline.rollout.policy_sync import PolicySync
from beamline.rollout.readiness import Readiness
from beamline.rollout.worker import RolloutWorker
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.service import WorkerStatus
from rollout_messages import export, policy_update

CANARY_TOKENS = [5, 9, 30, 7]
SHAPE = RoutingShape(num_layers=3, top_k=4, num_experts=16, sparse_layers=(1, 2))


class Bench:
    """A worker, and everything that it said."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        blobs: MemoryBlobStore | None = None,
        colocated: bool = True,
        shape: RoutingShape | None = None,
        exact: bool = True,
        answer_s: float = 0.02,
        sampler: Sampler | None = None,
        pause: Pause = "keep",
        deadline_s: float = 60.0,
        canary_first: bool = False,
    ) -> None:
        self.engine, self.folder = engine, folder
        self.blobs = blobs or MemoryBlobStore()
        self.status = WorkerStatus()
        self.said: list[m.Message] = []
        self.readiness = Readiness(self.status)
        activation = Activation(
            engine,
            self.blobs,
            self.readiness,
            pause=pause,
            deadline_s=deadline_s,
            canary_tolerance=1e-3,
            exact=exact,
            canary_first=canary_first,
        )
        self.policies = PolicySync(
            worker="rollout-0",
            incarnation="1",
            publish=self.say,
            readiness=self.readiness,
            activation=activation,
        )
        self.worker = RolloutWorker(
            worker="rollout-0",
            incarnation="1",
            engine=engine,
            sampler=sampler or engine,
            blobs=self.blobs,
            publish=self.say,
            readiness=self.readiness,
            colocated=colocated,
            shape=shape,
            answer_s=answer_s,
        )

    async def say(self, message: m.Message) -> None:
        self.said.append(message)

    async def exported(self, version: int, value: float | None = None) -> m.PolicyUpdate:
        """What the trainer has to say at the end of a step; the weights are all alike, the version if not told."""
        weights = {"weight": np.full(4, version if value is None else value)}
        ref = await self.blobs.put("policy", "weight_manifest", export(self.folder, version, weights).encode())
        logprobs = [token_logprob(token, version) for token in CANARY_TOKENS[1:]]
        return policy_update(version, ref, m.Canary(tokens=CANARY_TOKENS, logprobs=logprobs))

    async def hear(self, *messages: m.PolicyUpdate | m.Fence) -> list[m.Message]:
        """Tell the worker, one after the other; returns what it says then."""
        self.said.clear()
        for message in messages:
            if isinstance(message, m.Fence):
                await self.policies.on_fence(message)
            else:
                await self.policies.on_update(message)
        return self.said

    async def serve(self, update: m.PolicyUpdate) -> m.PolicyLoaded:
        """The policy and its open fence."""
        *_, loaded = await self.hear(update, opened(update.policy_version))
        assert isinstance(loaded, m.PolicyLoaded)
        self.said.clear()
        return loaded

    async def update(self, version: int) -> m.PolicyLoaded:
        """A new policy of the trainer, from its export to the worker's last answer."""
        return await self.serve(await self.exported(version))

    async def is_open(self) -> bool:
        passing = asyncio.create_task(self.readiness.when_open())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        passing.cancel()
        return passing.done()


def opened(version: int, attempt: int = 1) -> m.Fence:
    return m.Fence(policy_version=version, attempt=attempt, is_open=True)


def closed(version: int, attempt: int) -> m.Fence:
    return m.Fence(policy_version=version, attempt=attempt, is_open=False)


class Turns:
    """Lets a sampling engine go on a token at a time."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    def wait(self) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(turn)
        return turn

    async def next(self) -> asyncio.Future[None]:
        return await self._waiting.get()

    async def finish[T](self, sampling: asyncio.Task[T]) -> T:
        """Let it go on to its end."""
        while not sampling.done():
            following = asyncio.create_task(self.next())
            await asyncio.wait({sampling, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result().set_result(None)
            else:
                following.cancel()
        return sampling.result()
