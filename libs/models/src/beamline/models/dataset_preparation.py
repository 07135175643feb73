"""A published data set becomes the parquet file that a run reads.

The file is read twice: once to find out which rows are left, once to write them. Neither holds more than a batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import pyarrow as pa

from beamline.models.dataset_cleaning import Cleaned, clean
from beamline.models.dataset_files import (
    BATCH_ROWS,
    RawRow,
    Track,
    Unreadable,
    count_rows,
    parquet_schema,
    read_columns,
    read_raw,
    untracked,
)
from beamline.models.dataset_sources import Source, choose_split, convert, find_source, prepared_name
from beamline.models.datasets import COLUMNS, SCHEMA, require_columns, to_columns, write_batches


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The file, and what became of the published rows."""

    path: Path
    cleaned: Cleaned


@dataclass(frozen=True)
class _Reading:
    """The published rows in DAPO's layout, as often as they are asked for."""

    rows: Callable[[], Iterator[RawRow]]
    schema: pa.Schema


def prepare(
    name: str,
    source_file: Path | str,
    directory: Path | str,
    split: str | None = None,
    *,
    track: Track = untracked,
) -> Prepared:
    """Turn a published data set into rows that a run can read, duplicates and ambiguous prompts left out.

    Args:
        name: one of `SOURCES`.
        source_file: `.jsonl`, `.json` (lines) or `.parquet`. Rows in DAPO's layout stay as they are, with the
            instructions in their prompts; rows of a `question` or `problem` and an `answer` are converted.
        directory: where the file of `prepared_name` is written.
        split: one of the set's splits; by default the one that the file's name mentions, else the first.
        track: shows how far it is.

    Raises:
        ValueError: an unknown name, split or suffix, or a row that cannot be used. Nothing is written then.
    """
    source, path = find_source(name), Path(source_file)
    split = choose_split(name, split, path.stem)
    reading = _read(source, split, path)
    cleaned = clean(path, track("rows read", reading.rows(), count_rows(path)))
    if not cleaned.num_read:
        raise ValueError(f"{path} has no rows: give the published file of {name}")
    if not cleaned.kept:
        raise ValueError(f"{path}: each of its {cleaned.num_ambiguous_prompts} prompts has several ground truths")
    target = Path(directory) / prepared_name(name, split)
    rows = track("rows written", _kept(reading, cleaned.kept), len(cleaned.kept))
    return Prepared(path=write_batches(target, reading.schema, _batches(rows, reading.schema)), cleaned=cleaned)


def _read(source: Source, split: str, path: Path) -> _Reading:
    """By the layout that the file's columns, or its first row, show."""
    is_parquet = path.suffix == ".parquet"
    first = None if is_parquet else next(read_raw(path), None)
    columns = parquet_schema(path).names if is_parquet else list(first) if isinstance(first, dict) else []
    if source.answer is not None and not {"prompt", "reward_model"} <= set(columns):
        return _Reading(lambda: _converted(source, split, path), SCHEMA)
    if columns:
        require_columns(path, columns)
    if is_parquet:
        published = parquet_schema(path)
        return _Reading(lambda: read_columns(path, COLUMNS), pa.schema([published.field(c) for c in COLUMNS]))
    return _Reading(lambda: _numbered(path, split), SCHEMA)


def _converted(source: Source, split: str, path: Path) -> Iterator[RawRow]:
    """Questions and answers as prompts; in place of one that cannot be used stands why."""
    for number, raw in enumerate(read_raw(path), start=1):
        if isinstance(raw, Unreadable):
            yield raw
            continue
        try:
            yield to_columns(convert(source, split, number, raw))
        except ValueError as error:
            yield Unreadable(str(error))


def _numbered(path: Path, split: str) -> Iterator[RawRow]:
    """Lines in DAPO's layout, each with its number: what a line says about itself has no type of its own."""
    for index, raw in enumerate(read_raw(path)):
        yield raw if isinstance(raw, Unreadable) else {**raw, "extra_info": {"index": index, "split": split}}


def _kept(reading: _Reading, kept: list[int]) -> Iterator[RawRow]:
    chosen = set(kept)
    return (row for place, row in enumerate(reading.rows()) if place in chosen)


def _batches(rows: Iterator[RawRow], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for some in batched(rows, BATCH_ROWS):
        yield pa.RecordBatch.from_pylist(_only_columns(some), schema=schema)


def _only_columns(rows: tuple[RawRow, ...]) -> list[dict[str, Any]]:
    """What was found without fault: fields of the layout alone."""
    return [{column: row[column] for column in COLUMNS} for row in rows if not isinstance(row, Unreadable)]
