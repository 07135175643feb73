"""Paths and processes of the reward tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from beamline.protocol.reward_config import RewardSection
from beamline.reward.pool import MEMORY_BYTES, GraderPool, Graders

DATA = Path(__file__).parents[3] / "shared" / "data"

type StartPool = Callable[..., Awaitable[GraderPool]]
type StartGraders = Callable[..., Awaitable[Graders]]


@pytest.fixture
def published() -> Callable[[str], list[dict[str, Any]]]:
    """Reads a published data set; skips where there is none."""

    def read(name: str) -> list[dict[str, Any]]:
        if not (DATA / name).is_file():
            pytest.skip(f"{name} is not at {DATA}")
        with (DATA / name).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return read


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """Import path of a grader that misbehaves on demand."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return "planted_graders:by_text"


@pytest_asyncio.fixture
async def start_pool() -> AsyncIterator[StartPool]:
    """Starts pools of one grader that end with the test."""
    pools: list[GraderPool] = []

    async def start(grader: str, *, memory_bytes: int = MEMORY_BYTES, **settings: Any) -> GraderPool:
        section = RewardSection(**{"grader": grader, **settings})
        pool = GraderPool(grader, section, asyncio.Semaphore(section.workers), memory_bytes=memory_bytes)
        pools.append(pool)
        await pool.start()
        return pool

    yield start
    await asyncio.gather(*(pool.close() for pool in pools))


@pytest_asyncio.fixture
async def start_graders() -> AsyncIterator[StartGraders]:
    """Starts the graders of runs; they end with the test."""
    started: list[Graders] = []

    async def start(*names: str, **settings: Any) -> Graders:
        graders = Graders(names, RewardSection(**settings))
        started.append(graders)
        await graders.start()
        return graders

    yield start
    await asyncio.gather(*(graders.close() for graders in started))
