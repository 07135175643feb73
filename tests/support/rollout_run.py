"""A rollout service as a process on a real nats-server, in a run whose other services are the test."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.config import RunConfig
from beamline.runtime.deadline import deadline
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.run_files import write_config
from beamline.runtime.shm_blobs import ShmBlobStore, shm_root, sweep
from beamline.weights.manifest import WeightManifest
from brokers import SUBJECTS, Tasks
from rollout_bench import opened
from rollout_messages import export, policy_update

START_S = 180.0
"""Importing vLLM and starting it, on a machine that does other things too."""
ANSWER_S = 60.0


class Inbox:
    """Everything that arrives for one service, to be waited for by type."""

    def __init__(self) -> None:
        self._messages: list[m.Message] = []
        self._grown = asyncio.Event()

    async def __call__(self, message: m.Message) -> None:
        self._messages.append(message)
        self._grown.set()

    async def take[M: m.Message](self, kind: type[M], within_s: float = ANSWER_S) -> M:
        """The next message of that type; others stay."""
        async with deadline(within_s, f"a {kind.__name__}, have {self._messages}"):
            while True:
                for message in self._messages:
                    if isinstance(message, kind):
                        self._messages.remove(message)
                        return message
                self._grown.clear()
                await self._grown.wait()


class Run:
    """A run whose coordinator, reward and trainer are this test."""

    def __init__(self, folder: Path, model: Path, server: NatsServer) -> None:
        self.folder, self.model, self.server = folder, model, server
        self.blobs = ShmBlobStore(shm_root(SUBJECTS, folder))
        self.reward, self.coordinator = Inbox(), Inbox()
        self.buses: dict[str, NatsBus] = {}
        self.tasks = Tasks()
        self.processes: list[asyncio.subprocess.Process] = []

    async def open(self) -> None:
        for service in ("coordinator", "reward", "trainer"):
            self.buses[service] = await NatsBus.connect(self.server.credentials(service), SUBJECTS, ack_wait_s=3.0)
        await self.buses["coordinator"].ensure_streams()
        self.tasks.start(self.buses["reward"].work("reward", self.reward))
        self.tasks.start(self.buses["coordinator"].work("coordinator", self.coordinator))

    async def start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "beamline.rollout", "--run-dir", str(self.folder), "--worker", "rollout-0"),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    async def offer(self, version: int, manifest: WeightManifest, canary: m.Canary) -> None:
        """As the trainer does."""
        ref = await self.blobs.put("policy", "weight_manifest", manifest.encode())
        await self.buses["trainer"].publish(policy_update(version, ref, canary))

    async def publish_policy(
        self, version: int, manifest: WeightManifest, canary: m.Canary, within_s: float = ANSWER_S
    ) -> m.PolicyPrepared:
        """As `offer`; returns what the worker says."""
        await self.offer(version, manifest, canary)
        return await self.coordinator.take(m.PolicyPrepared, within_s)

    async def open_fence(self, version: int, attempt: int = 1) -> m.PolicyLoaded:
        """As the coordinator does; returns what the worker says."""
        await self.buses["coordinator"].publish(opened(version, attempt))
        return await self.coordinator.take(m.PolicyLoaded)

    def exported(self, version: int, weights: dict[str, np.ndarray]) -> WeightManifest:
        return export(self.folder, version, weights)

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        await self.tasks.cancel()
        for bus in self.buses.values():
            await bus.close()
        await self.server.stop()
        sweep(SUBJECTS, self.folder)


@asynccontextmanager
async def opened_run(tmp_path: Path) -> AsyncIterator[Run]:
    """A run of a randomised tiny Beam; its processes end with it."""
    model, folder = tmp_path / "model", tmp_path / "run"
    tiny.build(tiny.TINY_BEAM, model, seed=7, randomise=True)
    config = {
        "run": {"name": SUBJECTS.run},
        "model": {"path": str(model)},
        "data": {"max_prompt_tokens": 128},
        "algorithm": {"num_mini_batches": 1},
        "rollout": {
            "sampling": {"max_response_tokens": 384},
            "engine": {"kv_cache_mib": 64, "max_num_seqs": 16, "max_num_batched_tokens": 256, "threads": 1},
        },
        "bus": {"ack_wait_s": 3.0},
    }
    write_config(folder, msgspec.convert(config, RunConfig))
    run = Run(folder, model, NatsServer(folder, SUBJECTS))
    await run.server.start()
    try:
        await run.open()
        yield run
    finally:
        await run.close()
