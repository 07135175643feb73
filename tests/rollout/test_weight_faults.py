"""A real rollout service and the trainer's end of the weights, each killed before, in and after a transfer.

After each of it the policy that was served, or the one that was to come, answers as it must, and nothing is left.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.runtime.deadline import deadline
from beamline.weights.manifest import WeightManifest
from rollout_bench import opened
from rollout_messages import prompt_group
from rollout_run import START_S, Run
from shared_memory import segments

PROGRAM = Path(__file__).parents[1] / "support" / "weight_owner.py"
REFERENCE = Path(__file__).parents[1] / "parity" / "references" / "tiny-beam.safetensors"
SECONDS_TO_NOTICE = 10.0
ROUNDING = 1e-5
"""Of log-probabilities: how an engine that was started anew batches its requests changes their last bits. Other weights
would show in the canary too, which is compared with the reference."""


class Owner:
    """A process that owns one policy; it answers readers once `answer` was called."""

    def __init__(self, model: Path, version: int, folder: Path) -> None:
        command = [sys.executable, str(PROGRAM), str(model), str(version), str(folder / f"{version}.sock")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.manifest = WeightManifest.decode(bytes.fromhex(self._read()))

    async def asked(self) -> None:
        async with deadline(START_S, "a reader to ask for the weights"):
            assert await asyncio.to_thread(self._read) == "asked"

    def num_readers(self) -> int:
        """As of now; from here on it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while (line := self._read()) == "asked":
            pass
        return int(line)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(SECONDS_TO_NOTICE)
        self.process.stdout.close()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A socket's path may not be long, as a test's own folder is."""
    folder = Path(tempfile.mkdtemp(prefix="beamline-"))
    yield folder
    shutil.rmtree(folder)


async def kill(process: asyncio.subprocess.Process) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, SECONDS_TO_NOTICE)
    assert not alive, f"still running: {alive}"


async def sampled_logprobs(run: Run, name: str, version: int) -> np.ndarray:
    """Of a greedy sample; it must have come from that policy."""
    tokens = load_file(REFERENCE)["tokens"][0].tolist()
    group = prompt_group(tokens, seeds=[1], max_tokens=8, temperature=0.0, group_id=name, min_policy_version=version)
    await run.buses["coordinator"].publish(group)
    answer = await run.reward.take(m.TrajectoryGroup)
    assert (answer.group_id, answer.min_policy_version, answer.max_policy_version) == (name, version, version)
    trajectories = decode_blob(Trajectories, await run.blobs.get(answer.trajectories))
    return np.frombuffer(trajectories.rollout_logprobs, np.float32).copy()


async def test_killed_trainers_and_workers_leave_the_policy_that_was_served(run: Run, sockets: Path) -> None:
    reference, inbox = load_file(REFERENCE), run.coordinator
    canary = m.Canary(tokens=reference["tokens"][0].tolist(), logprobs=reference["logprobs"][0].tolist())
    shared = segments()
    other = run.folder.parent / "other"
    tiny.build(tiny.TINY_BEAM, other, seed=8, randomise=True)

    worker = await run.start()
    first = Owner(run.model, 0, sockets)
    first.num_readers()
    assert (await run.publish_policy(0, first.manifest, canary, START_S)).error == ""
    loaded = await run.open_fence(0)
    assert (loaded.policy_version, loaded.error) == (0, "") and loaded.canary_gap < 1e-4
    expected = await sampled_logprobs(run, "g-000000", 0)

    # The trainer dies while a worker fetches from it.
    dying = Owner(other, 1, sockets)
    await run.offer(1, dying.manifest, canary)
    await dying.asked()
    dying.process.kill()
    async with deadline(SECONDS_TO_NOTICE, "the worker to notice"):
        prepared = await inbox.take(m.PolicyPrepared)
    assert prepared.policy_version == 1 and "the process that owns the weights has ended" in prepared.error
    dying.process.wait()
    assert np.abs(await sampled_logprobs(run, "g-000001", 0) - expected).max() < ROUNDING

    # The worker dies before the next policy comes, while it fetches it, and when it has it.
    await kill(worker)
    last = Owner(run.model, 2, sockets)
    await run.offer(2, last.manifest, canary)
    worker = await run.start()
    await last.asked()
    await kill(worker)
    async with deadline(SECONDS_TO_NOTICE, "the owner to let go of the dead reader"):
        while await asyncio.to_thread(last.num_readers):
            pass
    worker = await run.start()
    prepared = await inbox.take(m.PolicyPrepared, START_S)
    assert (prepared.policy_version, prepared.error) == (2, "") and prepared.num_bytes > 0
    await kill(worker)
    await run.buses["coordinator"].publish(opened(2))
    worker = await run.start()
    while (loaded := await inbox.take(m.PolicyLoaded, START_S)).policy_version == 0:
        assert "was not prepared" in loaded.error, "the open fence of policy 0 was kept, its weights were not"
    assert (loaded.policy_version, loaded.error) == (2, "") and loaded.canary_gap < 1e-4
    assert np.abs(await sampled_logprobs(run, "g-000002", 2) - expected).max() < ROUNDING
    assert await asyncio.to_thread(last.num_readers) == 0, "weights that were loaded are held on to"
    await kill(worker)
    for owner in (first, last):
        owner.end()
    assert {path.name for path in sockets.iterdir()} == {"1.sock"}, "only what was killed leaves its socket"
    left = segments() - shared
    assert not left, f"left in shared memory: {left}"
