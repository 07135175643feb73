"""Prompts in parquet, one row a problem, and their preparation from the files in which data sets are published.

A row follows DAPO's layout: `data_source`, `prompt` (chat messages), `ability`, `reward_model` {ground_truth, style}
and `extra_info` {index, split}. Every error is a ValueError that names the file, the row (from 1) and the field.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = "Work through the problem step by step. Write the result on a last line of its own, as Answer: N."

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)


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
class _Source:
    """How one published data set is read: its question and answer fields, and the answer's form."""

    data_source: str
    answer: Callable[[Any], str]
    splits: tuple[str, ...] = ("test",)


def _last_number(answer: Any) -> str:
    """GSM8K: the number after the last `####`, without thousands commas."""
    _, mark, result = str(answer).rpartition("####")
    result = result.strip().replace(",", "")
    if not mark or not result:
        raise ValueError("no result after '####'")
    return result


def _competition_integer(answer: Any) -> str:
    """AIME: an integer from 0 to 999, published with or without leading zeros."""
    text = str(answer).strip()
    if not text.isdecimal() or len(text) > 3:
        raise ValueError("not an integer from 0 to 999")
    return str(int(text))


def _expression(answer: Any) -> str:
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("not a LaTeX expression")
    return answer.strip()


SOURCES: Mapping[str, _Source] = {
    "gsm8k": _Source(data_source="gsm8k", answer=_last_number, splits=("train", "test")),
    "aime-2025": _Source(data_source="aime-2025", answer=_competition_integer),
    # The published DAPO files call AIME 2024 by the name of its grader, and metrics follow them.
    "aime-2024": _Source(data_source="math_dapo", answer=_competition_integer),
    "math-500": _Source(data_source="math-500", answer=_expression),
}


def prepare(name: str, source_file: Path | str, directory: Path | str, split: str | None = None) -> Path:
    """Turn a published data set (JSON lines or parquet) into rows that a run can read; returns the parquet file.

    Args:
        name: one of `SOURCES`.
        source_file: `.jsonl`, `.json` (lines) or `.parquet`, with a `question` or `problem` and an `answer` a row.
        directory: where `<name>-<split>.parquet` is written, or `<name>.parquet` where there is only one split.
        split: one of the set's splits; by default the one that the file's name mentions, else the first.

    Raises:
        ValueError: an unknown name, split or suffix, or a row that cannot be used. Nothing is written then.
    """
    if name not in SOURCES:
        raise ValueError(f"data set {name!r} is not known: use one of {', '.join(SOURCES)}")
    source, path = SOURCES[name], Path(source_file)
    split = split or next((s for s in source.splits if s in path.stem), source.splits[0])
    if split not in source.splits:
        raise ValueError(f"data set {name} has no split {split!r}: use one of {', '.join(source.splits)}")
    rows = [_convert(source, split, path, number, raw) for number, raw in enumerate(_read_raw(path), start=1)]
    if not rows:
        raise ValueError(f"{path} has no rows: give the published file of {name}")
    suffix = f"-{split}" if len(source.splits) > 1 else ""
    return write_rows(Path(directory) / f"{name}{suffix}.parquet", rows)


def write_rows(path: Path | str, rows: Iterable[PromptRow]) -> Path:
    """Write rows to a parquet file, whole or not at all; `index` must be an integer."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_to_columns(row) for row in rows], schema=SCHEMA)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(table, file)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return path


def read_rows(path: Path | str) -> Iterator[PromptRow]:
    """The rows of a prepared or published parquet file, in order; columns beside DAPO's are ignored.

    Raises:
        ValueError: no such file, not parquet, a missing column, or a field of the wrong type. The file and its
            columns are checked at the call, each row when it is reached.
    """
    path = Path(path)
    file = _open_parquet(path)
    missing = [column for column in COLUMNS if column not in file.schema_arrow.names]
    if missing:
        names = ", ".join(file.schema_arrow.names)
        raise ValueError(
            f"{path} has no column {missing[0]!r} (it has {names}): prepare it with `beamline data prepare`"
        )
    return _iterate_rows(path, file)


def _iterate_rows(path: Path, file: pq.ParquetFile) -> Iterator[PromptRow]:
    number = 0
    for batch in file.iter_batches(columns=list(COLUMNS)):
        for raw in batch.to_pylist():
            number += 1
            yield _Fields(path, number).row(raw)


@dataclass(frozen=True)
class _Fields:
    """Checks the fields of one row, which it names in its errors."""

    path: Path
    number: int

    def row(self, raw: Mapping[str, Any]) -> PromptRow:
        reward_model = self.struct(raw, "reward_model", required=True)
        extra_info = self.struct(raw, "extra_info", required=False)
        index = extra_info.get("index")
        return PromptRow(
            data_source=self.text(raw, "data_source"),
            messages=self.messages(raw["prompt"]),
            ability=self.text(raw, "ability"),
            ground_truth=self.text(reward_model, "ground_truth", "reward_model."),
            style=self.text(reward_model, "style", "reward_model."),
            index=index if isinstance(index, int | str) else self.number - 1,
            split=str(extra_info.get("split") or ""),
            extra_info=extra_info,
        )

    def messages(self, value: Any) -> tuple[Mapping[str, str], ...]:
        expected = "chat messages such as [{role: user, content: ...}]"
        if not isinstance(value, list) or not value:
            self.refuse("prompt", value, expected)
        for message in value:
            if not isinstance(message, Mapping):
                self.refuse("prompt", value, expected)
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                self.refuse("prompt", message, "a message with a string as role and as content")
        return tuple(value)

    def struct(self, raw: Mapping[str, Any], name: str, *, required: bool) -> Mapping[str, Any]:
        value = raw[name]
        if value is None and not required:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(name, value, "a struct")
        return value

    def text(self, raw: Mapping[str, Any], name: str, parent: str = "") -> str:
        value = raw.get(name)
        if not isinstance(value, str) or not value:
            self.refuse(parent + name, value, "a string that is not empty")
        return value

    def refuse(self, name: str, value: Any, expected: str) -> NoReturn:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ValueError(f"{self.path} row {self.number}: field {name!r} is {shown}, expected {expected}")


def _convert(source: _Source, split: str, path: Path, number: int, raw: Mapping[str, Any]) -> PromptRow:
    fields = _Fields(path, number)
    lowered = {key.lower(): value for key, value in raw.items()}
    question = fields.text(lowered, "problem" if "problem" in lowered else "question")
    try:
        ground_truth = source.answer(lowered.get("answer"))
    except ValueError as error:
        fields.refuse("answer", lowered.get("answer"), f"another form: {error}")
    return PromptRow(
        data_source=source.data_source,
        messages=({"role": "user", "content": f"{INSTRUCTION}\n\n{question.strip()}"},),
        ground_truth=ground_truth,
        index=number - 1,
        split=split,
    )


def _to_columns(row: PromptRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.messages],
        "ability": row.ability,
        "reward_model": {"ground_truth": row.ground_truth, "style": row.style},
        "extra_info": {"index": row.index, "split": row.split},
    }


def _read_raw(path: Path) -> Iterator[Mapping[str, Any]]:
    match path.suffix:
        case ".parquet":
            for batch in _open_parquet(path).iter_batches():
                yield from batch.to_pylist()
        case ".jsonl" | ".json":
            yield from _read_json_lines(path)
        case suffix:
            raise ValueError(f"{path} ends in {suffix!r}: give a .jsonl, .json (lines) or .parquet file")


def _read_json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    _require_file(path)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} row {number}: not JSON: {error}; expected one object a line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path} row {number}: {type(row).__name__}, expected one JSON object a line")
            yield row


def _open_parquet(path: Path) -> pq.ParquetFile:
    _require_file(path)
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the path of the data set's file")
