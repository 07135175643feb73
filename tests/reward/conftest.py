"""Paths and processes of the reward tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from beamline.reward.pool import GraderPool

DATA = Path(__file__).parents[3] / "shared" / "data"

type StartPool = Callable[..., Awaitable[GraderPool]]


@pytest.fixture
def published() -> Callable[[str], list[dict[str, Any]]]:
    """Reads a published data set; skips where there is none."""

    def read(name: str) -> list[dict[str, Any]]:
        if not (DATA / name).is_file():
            pytest.skip(f"{name} is not at {DATA}")
        return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]

    return read


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """Import path of a grader that misbehaves on demand."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return "planted_graders:by_text"


@pytest_asyncio.fixture
async def start_pool() -> AsyncIterator[StartPool]:
    """Starts pools that end with the test."""
    pools: list[GraderPool] = []

    async def start(grader: str, num_workers: int = 1, timeout_s: float = 10.0, **options: int) -> GraderPool:
        pool = GraderPool(grader, num_workers=num_workers, timeout_s=timeout_s, **options)
        pools.append(pool)
        await pool.start()
        return pool

    yield start
    await asyncio.gather(*(pool.close() for pool in pools))
