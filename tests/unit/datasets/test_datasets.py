"""Preparation and reading of prompt rows: what goes in comes out, and what cannot be used is named."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from beamline.models.dataset_preparation import prepare
from beamline.models.datasets import COLUMNS, PromptRow, read_rows, write_rows
from prompt_files import json_lines, parquet, row

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"published data sets are not at {DATA}")


@pytest.mark.parametrize(
    ("name", "answer", "ground_truth", "data_source"),
    [
        ("gsm8k", "2*617=<<2*617=1234>>1,234\n#### 1,234", "1234", "gsm8k"),
        ("gsm8k", "so #### -5 ", "-5", "gsm8k"),
        ("aime-2025", "033", "33", "aime-2025"),
        ("aime-2025", 70, "70", "aime-2025"),
        ("aime-2025", r"336^\circ", "336", "aime-2025"),
        ("aime-2024", "000", "0", "math_dapo"),
        ("math-500", r"\frac{14}{3}", r"\frac{14}{3}", "math-500"),
    ],
)
def test_an_answer_becomes_the_ground_truth(tmp_path, name, answer, ground_truth, data_source):
    source = json_lines(tmp_path / "in.jsonl", {"question": " How many? ", "answer": answer})
    (prepared,) = read_rows(prepare(name, source, tmp_path / "out").path)
    assert (prepared.ground_truth, prepared.data_source) == (ground_truth, data_source)
    assert prepared.messages[0]["role"] == "user"
    assert prepared.messages[0]["content"].endswith("\n\nHow many?")
    assert "Answer: N" in prepared.messages[0]["content"]


def test_the_split_comes_from_the_file_name_and_names_the_file(tmp_path):
    source = json_lines(tmp_path / "gsm8k-test.jsonl", {"question": "q", "answer": "#### 1"})
    assert prepare("gsm8k", source, tmp_path).path.name == "gsm8k-test-cleaned.parquet"
    assert prepare("gsm8k", source, tmp_path, split="train").path.name == "gsm8k-train-cleaned.parquet"
    (prepared,) = read_rows(tmp_path / "gsm8k-test-cleaned.parquet")
    assert (prepared.split, prepared.index) == ("test", 0)


def test_a_published_parquet_file_is_prepared_like_its_json(tmp_path):
    rows = [{"Problem": "p", "Answer": 7, "Year": 2025}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "aime.parquet")
    (prepared,) = read_rows(prepare("aime-2025", tmp_path / "aime.parquet", tmp_path).path)
    assert prepared.ground_truth == "7"


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, ["in.jsonl row 2", "'answer'", "####"]),
        ("gsm8k", {"question": 5, "answer": "#### 1"}, ["in.jsonl row 2", "'question'", "5"]),
        ("gsm8k", {"answer": "#### 1"}, ["in.jsonl row 2", "'question'"]),
        ("aime-2025", {"problem": "p", "answer": "1/2"}, ["in.jsonl row 2", "'answer'", "1/2", "0 to 999"]),
        ("math-500", {"problem": "p"}, ["in.jsonl row 2", "'answer'"]),
        ("gsm8k", ["a list"], ["in.jsonl row 2", "list"]),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path, name, bad, words):
    good = {"question": "q", "answer": "#### 1"} if name == "gsm8k" else {"problem": "p", "answer": "1"}
    source = json_lines(tmp_path / "in.jsonl", good, bad)
    with pytest.raises(ValueError) as error:
        prepare(name, source, tmp_path / "out")
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "file", "text", "words"),
    [
        ("gsm9k", "in.jsonl", "{}", ["gsm9k", "gsm8k"]),
        ("gsm8k", "in.csv", "", [".csv", ".jsonl"]),
        ("gsm8k", "in.jsonl", "", ["no rows"]),
        ("gsm8k", "in.jsonl", "{oops", ["row 1", "not JSON"]),
        ("gsm8k", "in.parquet", "x", ["in.parquet", "not a parquet file"]),
    ],
)
def test_a_file_that_cannot_be_prepared_is_refused(tmp_path, name, file, text, words):
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError) as error:
        prepare(name, tmp_path / file, tmp_path / "out")
    for word in words:
        assert word in str(error.value)


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no split 'dev': use one of train, test"):
        prepare("gsm8k", tmp_path / "in.jsonl", tmp_path, split="dev")


def test_rows_survive_the_file(tmp_path):
    rows = [
        PromptRow(
            data_source="d",
            messages=({"role": "system", "content": "s"}, {"role": "user", "content": f"naïve {i}"}),
            ground_truth=str(i),
            index=i,
            split="train",
            extra_info={"index": i, "split": "train"},
        )
        for i in range(3)
    ]
    assert list(read_rows(write_rows(tmp_path / "deep" / "rows.parquet", rows))) == rows
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["rows.parquet"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    good = PromptRow(data_source="d", messages=({"role": "user", "content": "q"},), ground_truth="1", index=0)
    path = write_rows(tmp_path / "rows.parquet", [good])

    def broken():
        yield good
        raise RuntimeError("source went away")

    with pytest.raises(RuntimeError):
        write_rows(path, broken())
    assert len(list(read_rows(path))) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_published_extra_columns_and_text_indices_are_taken(tmp_path):
    path = parquet(
        tmp_path / "dapo.parquet", row(extra_info={"index": "a-1"}, source="x"), row(extra_info={"index": None})
    )
    assert [r.index for r in read_rows(path)] == ["a-1", 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "What is 1+1?"}, ["'prompt'", "What is 1+1?", "chat messages"]),
        ({"prompt": []}, ["'prompt'", "chat messages"]),
        ({"prompt": [{"role": "user"}]}, ["'prompt'", "content"]),
        ({"reward_model": {"ground_truth": 2, "style": "rule"}}, ["'reward_model.ground_truth'", "2"]),
        ({"reward_model": "2"}, ["'reward_model'", "struct"]),
        ({"data_source": None}, ["'data_source'", "missing"]),
        ({"extra_info": "x"}, ["'extra_info'", "struct"]),
    ],
)
def test_a_row_of_the_wrong_type_is_named(tmp_path, changes, words):
    path = parquet(tmp_path / "rows.parquet", row(**changes))
    with pytest.raises(ValueError) as error:
        list(read_rows(path))
    for word in ["rows.parquet row 1", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_named_at_the_call(tmp_path, column):
    without = row()
    del without[column]
    path = parquet(tmp_path / "rows.parquet", without)
    with pytest.raises(ValueError, match=f"no column '{column}'"):
        read_rows(path)


def test_a_missing_file_is_named_at_the_call(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.parquet is not a file"):
        read_rows(tmp_path / "absent.parquet")


@needs_data
@pytest.mark.parametrize(
    ("name", "file", "num_rows"),
    [
        ("gsm8k", "gsm8k-train.jsonl", 7473),
        ("gsm8k", "gsm8k-test.jsonl", 1319),
        ("aime-2025", "aime-2025.jsonl", 30),
        ("aime-2024", "aime-2024.jsonl", 30),
        ("math-500", "math-500.jsonl", 500),
    ],
)
def test_the_published_files_prepare_whole(tmp_path, name, file, num_rows):
    rows = list(read_rows(prepare(name, DATA / file, tmp_path).path))
    assert len(rows) == num_rows
    assert len({r.index for r in rows}) == num_rows
    if name != "math-500":
        assert all(r.ground_truth.removeprefix("-").replace(".", "", 1).isdecimal() for r in rows)
