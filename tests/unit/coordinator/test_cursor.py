"""The data cursor: the same prompts for the same seed, from any position; too long ones are left out and counted."""

import asyncio
from itertools import pairwise

import msgspec
import pytest

from beamline.coordinator.admission import Admission
from beamline.coordinator.core import Core
from beamline.coordinator.cursor import DataCursor, Prompt
from beamline.coordinator.parts import make_lease
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import PromptGroup
from beamline.protocol.subjects import Subjects
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.memory_bus import MemoryBus
from beamline.runtime.memory_hub import MemoryHub

ROWS = list(range(1, 21))
LIMIT = 17
"""Three of the rows are longer."""


def cursor(rows: list[int], *, seed: int | None = 0, limit: int = 100) -> DataCursor:
    return DataCursor(
        rows,
        lambda length: Prompt(str(length), "sums", "4", [0] * length),
        max_prompt_tokens=limit,
        seed=seed,
        source="sums.parquet",
    )


def draw(cursor: DataCursor, position: int, count: int) -> list[str]:
    drawn = list[str]()
    for _ in range(count):
        prompt, position = cursor.draw(position)
        drawn.append(prompt.prompt_id)
    return drawn


def test_an_epoch_holds_every_row_once_and_the_next_is_another_order():
    epochs = [draw(cursor(ROWS), 20 * epoch, 20) for epoch in range(6)]
    assert draw(cursor(ROWS), 0, 120) == [prompt for epoch in epochs for prompt in epoch]
    for before, after in pairwise(epochs):
        assert sorted(before, key=int) == sorted(after, key=int) == [str(row) for row in ROWS]
        assert before != after
    assert epochs[0] != sorted(epochs[0], key=int), "shuffled"


def test_it_resumes_at_any_position_and_follows_the_seed():
    assert draw(cursor(ROWS), 0, 30)[25:] == draw(cursor(ROWS), 25, 5)
    assert draw(cursor(ROWS), 0, 20) != draw(cursor(ROWS, seed=1), 0, 20)


def test_without_a_shuffle_the_order_is_that_of_the_file_in_every_epoch():
    assert draw(cursor(ROWS, seed=None), 0, 40) == [str(row) for row in ROWS * 2]


def test_too_long_prompts_are_dropped():
    short = cursor([5, 200, 6, 300], seed=None)
    assert draw(short, 0, 4) == ["5", "6", "5", "6"]
    assert short.draw(3) == (short.draw(0)[0], 5), "the position moves past what was dropped"
    assert short.epoch(6) == 1.5
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens=2: every prompt of sums\.parquet is longer"):
        cursor([5, 200], limit=2).draw(0)


def test_a_file_without_rows_is_refused():
    with pytest.raises(ConfigError, match=r"sums\.parquet: the file has no rows"):
        cursor([])


class Coordinators:
    """One run's coordinators, one after the other, on the same journal."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryHub(Subjects("beamline", "data")))

    async def serve(self, num_prompts: int) -> tuple[Core, Admission]:
        """Boot, issue so many prompts, and end without a word."""
        core = Core(RunConfig(), self.bus, MemoryBlobStore())
        await core.replay()
        admission = Admission(core, cursor(ROWS, limit=LIMIT), await make_lease(core))
        for _ in range(num_prompts):
            await admission.issue_next()
        return core, admission


def issued(core: Core) -> list[PromptGroup]:
    """What was issued, without the hour."""
    return [msgspec.structs.replace(group, deadline=0) for group in core.ledger.unanswered()]


@pytest.mark.parametrize("shares", [[45], [7, 38], [16, 1, 1, 27], [1] * 45])
def test_a_restarted_coordinator_issues_exactly_the_prompts_of_one_that_went_on(shares: list[int]):
    async def run(shares: list[int]) -> tuple[Core, Admission]:
        coordinators = Coordinators()
        for share in shares[:-1]:
            await coordinators.serve(share)
        return await coordinators.serve(shares[-1])

    core, admission = asyncio.run(run(shares))
    undisturbed, _ = asyncio.run(run([45]))
    assert issued(core) == issued(undisturbed)
    assert len({group.group_id for group in issued(core)}) == 45
    expected = draw(cursor(ROWS, limit=LIMIT), 0, 45)
    assert [group.task.prompt_id for group in issued(core)] == expected
    metrics = admission.data_metrics()
    assert metrics["data/epoch"] == metrics["data/position"] / 20
    assert metrics["data/dropped_prompts"] == metrics["data/position"] - 45 >= 6, "three an epoch"
