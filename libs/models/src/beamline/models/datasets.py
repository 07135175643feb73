"""Prompts in parquet, one row a problem: what a row holds, how it is read and written.

A row follows DAPO's layout: `data_source`, `prompt` (chat messages), `ability`, `reward_model` {ground_truth, style}
and `extra_info` {index, split}. Every error is a ValueError that names the file, the row (from 1) and the field.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from beamline.models.dataset_files import Unreadable, parquet_schema, read_columns

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def schema(index: pa.DataType) -> pa.Schema:
    """DAPO's columns; data sets number their rows, or name them by text."""
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
            ("extra_info", pa.struct([("index", index), ("split", pa.string())])),
        ]
    )


SCHEMA = schema(pa.int64())


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One problem. `messages` have string roles and contents; `index` tells the row from its neighbours."""

    data_source: str
    messages: tuple[Mapping[str, str], ...]
    ability: str = "math"
    ground_truth: str
    style: str = "rule"
    index: int | str
    split: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All of the column as it was read, `index` and `split` included."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with one field of a row."""

    kind: str
    """missing_field, wrong_type or empty_field."""
    field: str
    value: Any
    expected: str

    def __str__(self) -> str:
        if self.kind == "missing_field":
            return f"field {self.field!r} is missing, expected {self.expected}"
        shown = json.dumps(self.value, ensure_ascii=False, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return f"field {self.field!r} is {shown}, expected {self.expected}"


def faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Everything that keeps a row from being a `PromptRow`, field by field."""
    yield from text_faults(raw, "data_source")
    yield from _prompt_faults(raw)
    yield from text_faults(raw, "ability")
    reward_model = raw.get("reward_model")
    if isinstance(reward_model, Mapping):
        yield from text_faults(reward_model, "ground_truth", "reward_model.")
        yield from text_faults(reward_model, "style", "reward_model.")
    else:
        yield _misfit(raw, "reward_model", "a struct of ground_truth and style")
    if not isinstance(raw.get("extra_info"), Mapping | None):
        yield _misfit(raw, "extra_info", "a struct")


def text_faults(raw: Mapping[str, Any], name: str, parent: str = "") -> Iterator[Fault]:
    """What keeps a field from being a text that is not empty; `parent` is put before its name."""
    value = raw.get(name)
    if not isinstance(value, str):
        yield _misfit(raw, name, "a string that is not empty", parent)
    elif not value.strip():
        yield Fault(kind="empty_field", field=parent + name, value=value, expected="a string that is not empty")


def _prompt_faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    expected = "chat messages such as [{role: user, content: ...}]"
    messages = raw.get("prompt")
    if not isinstance(messages, list):
        yield _misfit(raw, "prompt", expected)
    elif not messages:
        yield Fault(kind="empty_field", field="prompt", value=messages, expected=expected)
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            yield Fault(kind="wrong_type", field="prompt", value=message, expected=expected)
        elif not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            expected = "a message with a string as role and as content"
            yield Fault(kind="wrong_type", field="prompt", value=message, expected=expected)


def _misfit(raw: Mapping[str, Any], name: str, expected: str, parent: str = "") -> Fault:
    """Of a value that is absent, or null as it is in a table, or of another type."""
    kind = "missing_field" if raw.get(name) is None else "wrong_type"
    return Fault(kind=kind, field=parent + name, value=raw.get(name), expected=expected)


def to_row(raw: Mapping[str, Any], number: int) -> PromptRow:
    """A row without faults; `number` counts from 1 and stands in for an index that is not there."""
    extra_info = raw.get("extra_info") or {}
    index = extra_info.get("index")
    return PromptRow(
        data_source=raw["data_source"],
        messages=tuple(raw["prompt"]),
        ability=raw["ability"],
        ground_truth=raw["reward_model"]["ground_truth"],
        style=raw["reward_model"]["style"],
        index=index if isinstance(index, int | str) else number - 1,
        split=str(extra_info.get("split") or ""),
        extra_info=extra_info,
    )


def read_rows(path: Path | str) -> Iterator[PromptRow]:
    """The rows of a prepared or published parquet file, in order; columns beside DAPO's are ignored.

    Raises:
        ValueError: no such file, not parquet, a missing column, or a field of the wrong type. The file and its
            columns are checked at the call, each row when it is reached.
    """
    path = Path(path)
    require_columns(path, parquet_schema(path).names)
    return _iterate_rows(path)


def require_columns(path: Path, columns: Iterable[str]) -> None:
    """Raises ValueError naming the first of DAPO's columns that is missing."""
    found = list(columns)
    missing = [column for column in COLUMNS if column not in found]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r} (it has {', '.join(found)}): prepare it with `beamline data prepare`"
        )


def _iterate_rows(path: Path) -> Iterator[PromptRow]:
    for number, raw in enumerate(read_columns(path, COLUMNS), start=1):
        if isinstance(raw, Unreadable):
            raise ValueError(f"{path} row {number}: {raw.why}")
        for fault in faults(raw):
            raise ValueError(f"{path} row {number}: {fault}")
        yield to_row(raw, number)


def write_rows(path: Path | str, rows: Iterable[PromptRow]) -> Path:
    """Write rows to a parquet file, whole or not at all; `index` must be an integer."""
    table = pa.Table.from_pylist([to_columns(row) for row in rows], schema=SCHEMA)
    return write_batches(path, table.schema, table.to_batches())


def to_columns(row: PromptRow) -> dict[str, Any]:
    """A row as it stands in the file."""
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.messages],
        "ability": row.ability,
        "reward_model": {"ground_truth": row.ground_truth, "style": row.style},
        "extra_info": {"index": row.index, "split": row.split},
    }


def write_batches(path: Path | str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Path:
    """Write a parquet file as it comes, whole or not at all; its folder is made when missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file, pq.ParquetWriter(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return path
