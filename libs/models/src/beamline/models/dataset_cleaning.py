"""One row for each problem: what is published several times counts once, what is published with two answers not at all.

Rows are told apart by 16 bytes of a hash, so the memory is that of the distinct rows' hashes, not of the file.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from beamline.models.dataset_files import RawRow, Unreadable
from beamline.models.datasets import faults

KEY = ("data_source", "prompt", "ability", "reward_model")
"""Rows that agree in these columns are one."""


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """Which rows are left, and why the others are not. All numbers but the last are rows."""

    kept: list[int]
    """Places of the rows, from 0, in order."""
    num_read: int
    num_duplicates: int
    """Equal to an earlier row."""
    num_ambiguous: int
    """Distinct rows of prompts that have more than one reward model."""
    num_ambiguous_prompts: int


def clean(path: Path, rows: Iterable[RawRow]) -> Cleaned:
    """Choose from rows in DAPO's layout the first of each kind, of prompts with exactly one reward model.

    Raises:
        ValueError: a row that has a fault; names the file (`path`), the row and the field.
    """
    seen: set[bytes] = set()
    distinct: list[tuple[int, bytes]] = []
    reward_models: dict[bytes, bytes] = {}
    ambiguous: set[bytes] = set()
    num_read = 0
    for place, raw in enumerate(rows):
        num_read += 1
        row = _sound(raw, f"{path} row {place + 1}")
        key = _digest(row[column] for column in KEY)
        if key in seen:
            continue
        seen.add(key)
        prompt, reward_model = _digest([row["prompt"]]), _digest([row["reward_model"]])
        distinct.append((place, prompt))
        if reward_models.setdefault(prompt, reward_model) != reward_model:
            ambiguous.add(prompt)
    kept = [place for place, prompt in distinct if prompt not in ambiguous]
    return Cleaned(
        kept=kept,
        num_read=num_read,
        num_duplicates=num_read - len(distinct),
        num_ambiguous=len(distinct) - len(kept),
        num_ambiguous_prompts=len(ambiguous),
    )


def _sound(raw: RawRow, where: str) -> Mapping[str, Any]:
    if isinstance(raw, Unreadable):
        raise ValueError(f"{where}: {raw.why}")
    for fault in faults(raw):
        raise ValueError(f"{where}: {fault}")
    return raw


def _digest(values: Iterable[Any]) -> bytes:
    text = json.dumps(list(values), sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode(), digest_size=16).digest()
