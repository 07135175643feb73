"""Weights that a test exports are gone after it, as is the run that it starts."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_messages import close_owners
from rollout_run import Run, opened_run


@pytest.fixture(autouse=True)
def exported_weights() -> Iterator[None]:
    yield
    close_owners()


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """The rollout service as a process, and the rest of its run."""
    async with opened_run(tmp_path) as run:
        yield run
