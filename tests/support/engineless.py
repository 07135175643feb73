"""Rollout and trainer without their engines, as processes with the real life cycle in a run of the real launcher.

    python engineless.py SERVICE,BEHAVIOUR --run-dir DIR --worker NAME

Rollout is the real service with `FakeEngine`; the trainer answers by the rules of the ring. BEHAVIOUR: `serve` goes on
for good; of rollout, `hang` writes responses that the planted grader never ends with, and `keep` never gives its memory
back; of the trainer, `hoard` fills the blob store from its first step on.
"""

import asyncio
import sys
from contextlib import suppress

from beamline.protocol import messages as m
from beamline.protocol.errors import BlobError
from beamline.rollout.engine import MemoryReport
from beamline.rollout.fake_engine import FakeEngine, token_logprob
from beamline.rollout.service import serve
from beamline.runtime.service import ServiceContext, run_service
from beamline.weights.manifest import WeightManifest
from scripted_services import Mishaps, ScriptedTrainer, Witness

TOKEN_S = 0.005
TRAIN_S = 0.2
CANARY_TOKENS = [5, 9, 30, 7]


class KeepingEngine(FakeEngine):
    """Holds on to its memory."""

    async def release_memory(self) -> MemoryReport:
        await asyncio.Event().wait()
        raise AssertionError("not reached")


class Trainer(ScriptedTrainer):
    """Exports policies that the fake engine can check."""

    manifest: m.BlobRef
    hoards = False
    hoarding: asyncio.Task[None]

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context.bus, context.worker, Witness(), lambda _: 0, Mishaps())
        self.incarnation = context.incarnation
        self.context = context

    async def announce(self) -> None:
        await self.export(0)
        await super().announce()
        self.context.status.state = m.WorkerState.READY

    async def train(self, batch: m.TrainBatch) -> m.Message:
        await asyncio.sleep(TRAIN_S)
        await self.export(batch.step)
        if self.hoards:
            self.hoarding = asyncio.create_task(self.fill_the_store())
        return await super().train(batch)

    async def export(self, version: int) -> None:
        manifest = WeightManifest(policy_version=version, places=[], tensors=[])
        self.manifest = await self.context.blobs.put("policy", "weight_manifest", manifest.encode())

    async def fill_the_store(self) -> None:
        """Take all room in large pieces, then every page that comes free."""
        for size in (1 << 16, 1 << 12, 1):
            with suppress(BlobError):
                while True:
                    await self.context.blobs.put("hoard", "trajectories", bytes(size))
        while True:
            with suppress(BlobError):
                await self.context.blobs.put("hoard", "trajectories", b"x")
            await asyncio.sleep(0.01)

    def update(self, version: int) -> m.PolicyUpdate:
        logprobs = [token_logprob(token, version) for token in CANARY_TOKENS[1:]]
        return m.PolicyUpdate(
            step=version,
            policy_version=version,
            manifest=self.manifest,
            canary=m.Canary(tokens=CANARY_TOKENS, logprobs=logprobs),
            stats={"policy/loss": 0.0},
        )


async def paced() -> None:
    """Between two tokens."""
    await asyncio.sleep(TOKEN_S)


async def rollout(context: ServiceContext) -> None:
    engine_type = KeepingEngine if BEHAVIOUR == "keep" else FakeEngine
    engine = engine_type(
        max_model_tokens=context.config.max_model_tokens,
        wait=lambda: asyncio.ensure_future(paced()),
        respond=lambda _, seed: "hang" if BEHAVIOUR == "hang" else f"Answer: {seed}",
    )
    await serve(context, engine, engine)


async def trainer(context: ServiceContext) -> None:
    scripted = Trainer(context)
    scripted.hoards = BEHAVIOUR == "hoard"
    await scripted.announce()
    bus = context.bus
    await context.until_stopped(bus.work("trainer", scripted.handle), bus.follow(m.Phase, scripted.phase))


if __name__ == "__main__":
    SERVICE, BEHAVIOUR = sys.argv[1].split(",")
    run_service(SERVICE, {"rollout": rollout, "trainer": trainer}[SERVICE], sys.argv[2:])
