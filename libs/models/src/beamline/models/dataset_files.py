"""Rows out of the files in which data sets come: parquet and JSON lines, one at a time, however long the file.

What is wrong with a file is a ValueError that names it. What is wrong with one row is an `Unreadable` in its place, so
that the reader decides whether to end there or to go on.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_ROWS = 8_192
"""Rows that are in memory at a time."""

BUFFER_BYTES = 2**20
"""Read of a column at a time. Otherwise the library holds all of a row group, which may be half of the file."""

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Unreadable:
    """Stands for a row that holds no fields."""

    why: str


type RawRow = Mapping[str, Any] | Unreadable

type Track = Callable[[str, Iterator[RawRow], int | None], Iterator[RawRow]]
"""Passes rows on and shows that it does: what is done with them, the rows, and how many there are if that is known."""


def untracked(what: str, rows: Iterator[RawRow], num_rows: int | None) -> Iterator[RawRow]:
    """Shows nothing."""
    return rows


def read_raw(path: Path) -> Iterator[RawRow]:
    """The rows of a .jsonl, .json (lines) or .parquet file, in order.

    Raises:
        ValueError: another suffix, no such file, not a whole parquet file, or one that is damaged further in.
    """
    require_file(path)
    if path.suffix == ".parquet":
        for batch in _parquet_batches(path):
            yield from _rows_of(batch)
    else:
        yield from _json_lines(path)


def read_columns(path: Path, columns: Sequence[str]) -> Iterator[RawRow]:
    """The rows of a parquet file with these columns alone. Raises ValueError as `read_raw` does."""
    for batch in _parquet_batches(path, columns):
        yield from _rows_of(batch)


def count_rows(path: Path) -> int | None:
    """Rows of a file, where they can be had without reading it. Raises ValueError as `parquet_schema` does."""
    if path.suffix != ".parquet":
        return None
    with _open(path) as file:
        return file.metadata.num_rows


def parquet_schema(path: Path) -> pa.Schema:
    """The columns of a parquet file. Raises ValueError: no such file, or not a whole parquet file."""
    with _open(path) as file:
        return file.schema_arrow.remove_metadata()


def _parquet_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    num_read = 0
    with _open(path) as file:
        try:
            for batch in file.iter_batches(BATCH_ROWS, columns=None if columns is None else list(columns)):
                yield batch
                num_read += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged after row {num_read}: {error}; copy or prepare it again") from error


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the path of the data set's file")
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}; copy or prepare it again") from error


def _rows_of(batch: pa.RecordBatch) -> Iterator[RawRow]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for row in range(batch.num_rows):
            yield _row_of(batch.slice(row, 1))


def _row_of(row: pa.RecordBatch) -> RawRow:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 ({error.reason} at byte {error.start}): save the text as UTF-8")


def _json_lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for line in file:
            yield _json_line(line)


def _json_line(line: bytes) -> RawRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 ({error.reason} at byte {error.start}): save the file as UTF-8")
    except ValueError as error:
        return Unreadable(f"not JSON: {error}; expected one object a line")
    return row if isinstance(row, dict) else Unreadable(f"{type(row).__name__}, expected one JSON object a line")


def require_file(path: Path) -> None:
    """Raises ValueError unless there is a file whose name ends in one of `SUFFIXES`."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the path of the data set's file")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}: give a .jsonl, .json (lines) or .parquet file")
