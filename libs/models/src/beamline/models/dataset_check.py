"""What is wrong with a data set, row by row: everything that would stop a run, and what would spoil one in silence."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from beamline.models.dataset_files import (
    RawRow,
    Track,
    Unreadable,
    count_rows,
    parquet_schema,
    read_raw,
    require_file,
    untracked,
)
from beamline.models.datasets import COLUMNS, faults

type CountTokens = Callable[[Sequence[Mapping[str, str]]], int]
"""Tokens of a chat as a model's template renders it. Raises ValueError where the template refuses it."""

type Unread = Callable[[Sequence[str]], Sequence[str]]
"""For each ground truth why a grader cannot read it; empty where it can."""

KINDS: Mapping[str, str] = {
    "unreadable_file": "the file cannot be read to its end",
    "unreadable_row": "rows that hold no fields",
    "missing_column": "columns that the file lacks",
    "missing_field": "fields that are missing",
    "wrong_type": "fields of the wrong type",
    "empty_field": "fields that are empty",
    "duplicate_prompt": "prompts that stand in an earlier row",
    "refused_prompt": "prompts that the chat template refuses",
    "long_prompt": "prompts over the limit: a run drops them",
    "unreadable_truth": "ground truths that the grader cannot read",
}
"""Kinds of finding, in the order in which they are counted up."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong. `row` counts from 1; None is the whole file."""

    kind: str
    row: int | None
    field: str
    text: str


@dataclass(kw_only=True)
class Findings:
    """All that was found: counted in full, kept up to `max_kept` of a kind (None keeps all)."""

    max_kept: int | None
    num_rows: int = 0
    longest_prompt: int = 0
    """Tokens; 0 where none was counted."""
    counts: Counter[str] = field(default_factory=Counter[str])
    kept: list[Finding] = field(default_factory=list[Finding])

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if self.max_kept is None or self.counts[finding.kind] <= self.max_kept:
            self.kept.append(finding)


def check(
    path: Path,
    *,
    count_tokens: CountTokens | None = None,
    max_prompt_tokens: int,
    unread: Unread | None = None,
    max_kept: int | None = None,
    track: Track = untracked,
) -> Findings:
    """Look at every row of a .parquet or .jsonl file in DAPO's layout.

    Args:
        path: the file.
        count_tokens: by the model's tokenizer and template; None leaves lengths unchecked.
        max_prompt_tokens: of a run.
        unread: by a grader; None leaves ground truths unread.
        max_kept: findings kept of a kind; all are counted.
        track: shows how far it is.

    Raises:
        ValueError: there is no such file, or its name ends in no known suffix.
    """
    require_file(path)
    findings, rows = Findings(max_kept=max_kept), _Rows(count_tokens, max_prompt_tokens)
    try:
        for finding in _walk(path, rows, track):
            findings.add(finding)
    except ValueError as error:
        findings.add(Finding(kind="unreadable_file", row=None, field="", text=str(error)))
    for finding in _unread_truths(rows.truths, unread):
        findings.add(finding)
    findings.num_rows, findings.longest_prompt = rows.number, rows.longest
    return findings


def _walk(path: Path, rows: "_Rows", track: Track) -> Iterator[Finding]:
    lacking = _lacking(path)
    for column in lacking:
        yield Finding(kind="missing_column", row=None, field=column, text=f"{path} has no column {column!r}")
    for raw in track("rows looked at", read_raw(path), count_rows(path)):
        for finding in rows.look(raw):
            if finding.field.partition(".")[0] not in lacking:
                yield finding
    if not rows.number:
        raise ValueError(f"{path} has no rows")


def _lacking(path: Path) -> list[str]:
    """Columns that a parquet file does not have; lines have none, only fields."""
    names = parquet_schema(path).names if path.suffix == ".parquet" else COLUMNS
    return [column for column in COLUMNS if column not in names]


class _Rows:
    """Looks at one row after the other, and remembers of them what later ones are compared with."""

    def __init__(self, count_tokens: CountTokens | None, max_prompt_tokens: int) -> None:
        self._count_tokens = count_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._first: dict[bytes, int] = {}
        self.number = 0
        """Of the row that was looked at last, from 1."""
        self.longest = 0
        self.truths: dict[str, list[int]] = {}
        """Rows by ground truth."""

    def look(self, raw: RawRow) -> Iterator[Finding]:
        """What is wrong with the next row."""
        self.number = number = self.number + 1
        if isinstance(raw, Unreadable):
            yield Finding(kind="unreadable_row", row=number, field="", text=raw.why)
            return
        found = list(faults(raw))
        for fault in found:
            yield Finding(kind=fault.kind, row=number, field=fault.field, text=str(fault))
        faulty = {fault.field for fault in found}
        if "prompt" not in faulty:
            yield from self._look_at_prompt(number, raw["prompt"])
        if not faulty & {"reward_model", "reward_model.ground_truth"}:
            self.truths.setdefault(raw["reward_model"]["ground_truth"], []).append(number)

    def _look_at_prompt(self, number: int, messages: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
        first = self._first.setdefault(blake2b(text.encode(), digest_size=16).digest(), number)
        if first != number:
            yield Finding(kind="duplicate_prompt", row=number, field="prompt", text=f"the prompt of row {first} again")
        elif self._count_tokens is not None:
            yield from self._measure(number, messages, self._count_tokens)

    def _measure(
        self, number: int, messages: Sequence[Mapping[str, Any]], count_tokens: CountTokens
    ) -> Iterator[Finding]:
        try:
            num_tokens = count_tokens(messages)
        except ValueError as error:
            yield Finding(kind="refused_prompt", row=number, field="prompt", text=f"the chat template says: {error}")
            return
        self.longest = max(self.longest, num_tokens)
        if num_tokens > (limit := self._max_prompt_tokens):
            text = f"{num_tokens} tokens, over the limit of {limit}"
            yield Finding(kind="long_prompt", row=number, field="prompt", text=text)


def _unread_truths(truths: Mapping[str, list[int]], unread: Unread | None) -> Iterator[Finding]:
    if unread is None or not truths:
        return
    found = [
        (number, truth, why)
        for (truth, numbers), why in zip(truths.items(), unread(list(truths)), strict=True)
        if why
        for number in numbers
    ]
    for number, truth, why in sorted(found):
        shown = json.dumps(truth[:80], ensure_ascii=False)
        text = f"{shown}: {why}"
        yield Finding(kind="unreadable_truth", row=number, field="reward_model.ground_truth", text=text)
