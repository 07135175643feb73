"""Data set files for tests: sound rows in DAPO's layout, and files that are broken in one way each."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = "Solve the following problem. The last line of your response should be Answer: $Answer.\n\n"


def row(index: int = 0, **changes: object) -> dict[str, object]:
    """A sound row; every index has a prompt of its own."""
    sound: dict[str, object] = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{index}+1"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(index + 1), "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
    }
    return sound | changes


def truth(value: object, index: int = 0) -> dict[str, object]:
    """A row with this ground truth."""
    return row(index, reward_model={"ground_truth": value, "style": "rule"})


def parquet(path: Path, *rows: Mapping[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def json_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def published_dapo(path: Path, contents: Sequence[str], truths: Sequence[str]) -> Path:
    """A file as DAPO-Math-17k is published: every row has an identity of its own, in one row group."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": content, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{number:08x}-0000"},
        }
        for number, (content, answer) in enumerate(zip(contents, truths, strict=True))
    ]
    return parquet(path, *rows)


def _without_ability(path: Path) -> Path:
    lacking = row()
    del lacking["ability"]
    return parquet(path, lacking)


def _truncated(path: Path) -> Path:
    whole = parquet(path, *(row(index) for index in range(100))).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def _damaged(path: Path) -> Path:
    """Sound at both ends."""
    whole = bytearray(parquet(path, *(row(index) for index in range(3000))).read_bytes())
    whole[1000:6000] = b"\xff" * 5000
    path.write_bytes(whole)
    return path


def _latin(path: Path) -> Path:
    """The second of two prompts is not UTF-8, which the file cannot know."""
    table = pa.Table.from_pylist([row(0), row(1, prompt=[{"role": "user", "content": "XXXX"}])])
    pq.write_table(table, path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"XXXX", b"caf\xe9"))
    return path


def _latin_lines(path: Path) -> Path:
    lines = [json.dumps(row(0)), json.dumps(row(1, ability="caf\u00e9"), ensure_ascii=False)]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    return path


def _empty(path: Path) -> Path:
    path.touch()
    return path


def _half_line(path: Path) -> Path:
    path.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1))[:40], encoding="utf-8")
    return path


def _no_rows(path: Path) -> Path:
    table = pa.Table.from_pylist([row(0)])
    pq.write_table(table.slice(0, 0), path)
    return path


BROKEN: Mapping[str, tuple[str, Callable[[Path], Path], tuple[str, ...]]] = {
    "a missing column": ("bad.parquet", _without_ability, ("no column 'ability'",)),
    "a prompt that is a string": (
        "bad.parquet",
        lambda path: parquet(path, row(0, prompt="1+1")),
        ("row 1", "'prompt'", '"1+1"', "chat messages"),
    ),
    "a ground truth of another type": (
        "bad.parquet",
        lambda path: parquet(path, truth(2)),
        ("row 1", "'reward_model.ground_truth'", "is 2", "string"),
    ),
    "a ground truth that is missing": (
        "bad.parquet",
        lambda path: parquet(path, row(0), row(1), truth(None, 2)),
        ("row 3", "'reward_model.ground_truth'", "missing"),
    ),
    "a ground truth that is empty": (
        "bad.parquet",
        lambda path: parquet(path, row(0), truth(" ", 1)),
        ("row 2", "'reward_model.ground_truth'", "not empty"),
    ),
    "an empty file": ("bad.parquet", _empty, ("not a parquet file",)),
    "a file without rows": ("bad.parquet", _no_rows, ("no rows",)),
    "a truncated file": ("bad.parquet", _truncated, ("not a parquet file",)),
    "a damaged file": ("bad.parquet", _damaged, ("damaged after row",)),
    "a parquet file that is not UTF-8": ("bad.parquet", _latin, ("row 2", "not UTF-8")),
    "lines that are not UTF-8": ("bad.jsonl", _latin_lines, ("row 2", "not UTF-8")),
    "a line that is cut off": ("bad.jsonl", _half_line, ("row 2", "not JSON")),
    "lines without rows": ("bad.jsonl", _empty, ("no rows",)),
}
"""What is broken: the file's name, how it is made, and what has to be said of it."""
