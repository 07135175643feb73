"""The data cursor: the same prompts for the same seed, from any position; too long ones are left out."""

import pytest

from beamline.coordinator.cursor import DataCursor, Prompt
from beamline.protocol.errors import ConfigError


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
    drawn = draw(cursor(list(range(1, 21))), 0, 40)
    first, second = drawn[:20], drawn[20:]
    assert sorted(first) == sorted(second) and first != second
    assert first != sorted(first, key=int), "shuffled"


def test_it_resumes_at_any_position_and_follows_the_seed():
    rows = list(range(1, 21))
    assert draw(cursor(rows), 0, 30)[25:] == draw(cursor(rows), 25, 5)
    assert draw(cursor(rows), 0, 20) != draw(cursor(rows, seed=1), 0, 20)
    assert draw(cursor(rows, seed=None), 0, 3) == ["1", "2", "3"]


def test_too_long_prompts_are_dropped_and_counted():
    short = cursor([5, 200, 6, 300], seed=None)
    assert draw(short, 0, 4) == ["5", "6", "5", "6"]
    assert short.num_dropped == 3
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens=2: every prompt of sums\.parquet is longer"):
        cursor([5, 200], limit=2).draw(0)


def test_a_file_without_rows_is_refused():
    with pytest.raises(ConfigError, match=r"sums\.parquet: the file has no rows"):
        cursor([])
