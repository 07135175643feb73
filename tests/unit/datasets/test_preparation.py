"""DAPO's published file: what is left of it, in whose memory, and why the rest is not."""

import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from beamline.models.dataset_preparation import prepare
from beamline.models.datasets import read_rows
from prompt_files import INSTRUCTION, json_lines, parquet, published_dapo, row


def questions(number: int) -> list[str]:
    return [f"{INSTRUCTION}What is {index} times 7?" for index in range(number)]


def test_the_published_file_is_reduced_to_prompts_with_one_answer(tmp_path: Path) -> None:
    """200 prompts a hundred times over; ten of them have a second answer somewhere in the middle."""
    contents, truths = questions(200) * 100, [str(7 * index) for index in range(200)] * 100
    for index in range(10):
        truths[200 * 50 + index] = "another"
    prepared = prepare("dapo", published_dapo(tmp_path / "in.parquet", contents, truths), tmp_path / "out")
    assert prepared.path == tmp_path / "out" / "dapo-math-17k-cleaned.parquet"
    cleaned = prepared.cleaned
    assert (cleaned.num_read, len(cleaned.kept), cleaned.num_duplicates) == (20_000, 190, 20_000 - 210)
    assert (cleaned.num_ambiguous, cleaned.num_ambiguous_prompts) == (20, 10)
    rows = list(read_rows(prepared.path))
    assert [r.messages[0]["content"] for r in rows] == contents[10:200], "as published, in the order of the file"
    assert [r.ground_truth for r in rows] == truths[10:200]
    assert rows[0].index == "0000000a-0000" and rows[0].data_source == "math_dapo"


def test_rows_are_one_when_the_four_columns_are_equal(tmp_path: Path) -> None:
    rows = [row(0), row(0, extra_info={"index": 9, "split": "train"}), row(0, ability="algebra"), row(1)]
    prepared = prepare("dapo", parquet(tmp_path / "in.parquet", *rows), tmp_path)
    assert prepared.cleaned.kept == [0, 2, 3]
    assert [r.ability for r in read_rows(prepared.path)] == ["math", "algebra", "math"]


def test_columns_beside_the_layout_are_left_out_and_lines_become_the_same_rows(tmp_path: Path) -> None:
    rows = [row(index, source="somewhere") for index in range(3)]
    from_parquet = prepare("dapo", parquet(tmp_path / "in.parquet", *rows), tmp_path / "a").path
    from_lines = prepare("dapo", json_lines(tmp_path / "in.jsonl", *rows), tmp_path / "b").path
    assert list(read_rows(from_parquet)) == list(read_rows(from_lines))
    assert "source" not in pq.ParquetFile(from_parquet).schema_arrow.names


def test_a_set_of_questions_may_be_published_in_the_layout_too(tmp_path: Path) -> None:
    """As AIME 2024 is by DAPO, 32 times over."""
    rows = [row(index, data_source="math_dapo") for index in range(30)] * 32
    prepared = prepare("aime-2024", parquet(tmp_path / "aime-2024.parquet", *rows), tmp_path / "out")
    assert prepared.path.name == "aime-2024-cleaned.parquet"
    assert prepared.cleaned.num_duplicates == 31 * 30
    assert [r.messages[0]["content"] for r in read_rows(prepared.path)] == [f"{index}+1" for index in range(30)]


def test_a_set_that_has_no_questions_needs_the_layout(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "in.jsonl", {"question": "q", "answer": "1"})
    with pytest.raises(ValueError, match=r"in\.jsonl has no column 'data_source' \(it has question, answer\)"):
        prepare("dapo", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_nothing_but_ambiguous_prompts_is_refused(tmp_path: Path) -> None:
    file = published_dapo(tmp_path / "in.parquet", ["q", "q"], ["1", "2"])
    with pytest.raises(ValueError, match="each of its 1 prompts has several ground truths"):
        prepare("dapo", file, tmp_path / "out")


MEASURE = """
import sys
from pathlib import Path
from beamline.models.dataset_preparation import prepare
for file in sys.argv[2:]:
    prepare("dapo", file, sys.argv[1])
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
"""Prints the peak of the resident memory in KiB. What getrusage tells would include the parent's."""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Four times the rows are 115 MB more, all in one row group, of texts that do not compress."""
    contents = [random.Random(number).randbytes(800).hex() for number in range(1200)]
    files = [
        published_dapo(tmp_path / f"{times}.parquet", contents * times, [str(n) for n in range(1200)] * times)
        for times in (20, 80)
    ]
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "out"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    small_kib, large_kib = (int(line) for line in done.stdout.split())
    assert large_kib - small_kib < 50 * 1024
