"""`beamline top` on a terminal and in a pipe, beside a live ring over a real broker."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from beamline.runtime.deadline import deadline
from live_ring import CONFIG, LiveRing
from live_run import live_run
from terminals import OnTerminal


@pytest_asyncio.fixture
async def ring(tmp_path: Path) -> AsyncIterator[LiveRing]:
    """A run that is about to train its second step."""
    async with live_run(tmp_path, CONFIG) as run:
        ring = await LiveRing.start(run)
        ring.trainer.allow(1)
        yield ring
        await ring.stop()


def command(ring: LiveRing) -> list[str]:
    run_dir = ring.run.run_dir
    return [sys.executable, "-m", "beamline.coordinator.cli", "top", run_dir.name, "--runs", str(run_dir.parent)]


async def test_it_follows_a_run_resizes_and_leaves(ring: LiveRing) -> None:
    top = await OnTerminal.start(command(ring), 80, 24)
    try:
        lines = await top.until("step 2/4  train", "rollout-0", "rollout-1", "trainer", "1/4 steps")
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        assert not top.is_as_before()
        top.resize(130, 30)
        wide = await top.until("pid")
        assert max(map(len, wide)) == 130 and len(wide) <= 30
        top.press("x")
        top.press("q")
        code, rest = await top.ended()
        assert (code, rest.strip()) == (0, "")
        assert top.is_as_before()
    finally:
        await top.close()


async def test_an_interrupt_leaves_it_too(ring: LiveRing) -> None:
    top = await OnTerminal.start(command(ring), 80, 24)
    try:
        await top.until("rollout-0")
        top.process.send_signal(signal.SIGINT)
        code, _ = await top.ended()
        assert code == 0 and top.is_as_before()
    finally:
        await top.close()


async def test_it_ends_with_the_run(ring: LiveRing) -> None:
    top = await OnTerminal.start(command(ring), 80, 24)
    piped = await asyncio.create_subprocess_exec(*command(ring), stdout=PIPE, stderr=PIPE)
    try:
        await top.until("step 2/4  train")
        assert piped.stdout is not None
        async with deadline(20, "the first lines in the pipe"):
            read = (await piped.stdout.readuntil(b"ready")).decode()
        await ring.finish()
        code, rest = await top.ended()
        assert code == 0 and top.is_as_before()
        assert "run ring: finished after 4 steps" in rest
        async with deadline(20, "the command in the pipe to end"):
            out, err = await piped.communicate()
        text = read + out.decode()
        assert (piped.returncode, err) == (0, b"")
        assert "\x1b" not in text
        assert text.startswith("run ring: step 2/4, 0:00:0")
        assert [step in text for step in ("step 2/4  ", "step 3/4  ", "step 4/4  ")] == [True] * 3
        assert text.rstrip().splitlines()[-1].startswith("prompts: ")
        again = await asyncio.create_subprocess_exec(*command(ring), stdout=PIPE, stderr=PIPE)
        out, _ = await again.communicate()
        assert again.returncode == 0
        assert out.decode().startswith("run ring: finished after 4 steps")
    finally:
        await top.close()
        if piped.returncode is None:
            piped.kill()
