"""The check of a data set: every fault once, with its row; what is sound is not touched."""

import json
from pathlib import Path

import pytest

from beamline.models.dataset_check import KINDS, Finding, Findings, check
from prompt_files import BROKEN, json_lines, parquet, row, truth


def look(path: Path, **options: object) -> Findings:
    defaults: dict[str, object] = {"max_prompt_tokens": 8}
    return check(path, **defaults | options)  # pyright: ignore[reportArgumentType]


def places(findings: Findings) -> list[tuple[str, int | None, str]]:
    return [(finding.kind, finding.row, finding.field) for finding in findings.kept]


def test_every_fault_of_every_row_is_found(tmp_path: Path) -> None:
    rows = [
        row(0),
        row(1, prompt="1+1", ability=""),
        {"data_source": "sums"},
        truth(5, 3),
        row(4, prompt=[{"role": "user"}], extra_info="x"),
        row(5),
    ]
    findings = look(json_lines(tmp_path / "rows.jsonl", *rows))
    assert places(findings) == [
        ("wrong_type", 2, "prompt"),
        ("empty_field", 2, "ability"),
        ("missing_field", 3, "prompt"),
        ("missing_field", 3, "ability"),
        ("missing_field", 3, "reward_model"),
        ("wrong_type", 4, "reward_model.ground_truth"),
        ("wrong_type", 5, "prompt"),
        ("wrong_type", 5, "extra_info"),
    ]
    assert findings.num_rows == 6
    assert findings.counts == {"wrong_type": 4, "empty_field": 1, "missing_field": 3}
    assert findings.kept[0].text == (
        "field 'prompt' is \"1+1\", expected chat messages such as [{role: user, content: ...}]"
    )


def test_a_lacking_column_is_told_once_and_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row(0, prompt=[]).items() if name != "ability"} for _ in range(3)]
    assert places(look(parquet(tmp_path / "rows.parquet", *rows))) == [
        ("missing_column", None, "ability"),
        ("empty_field", 1, "prompt"),
        ("empty_field", 2, "prompt"),
        ("empty_field", 3, "prompt"),
    ]


def test_a_prompt_that_comes_again_names_its_first_row(tmp_path: Path) -> None:
    (found,) = look(parquet(tmp_path / "rows.parquet", row(0), row(1), truth("9", 0))).kept
    assert (found.kind, found.row, found.text) == ("duplicate_prompt", 3, "the prompt of row 1 again")


def test_prompts_are_measured_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    def count(messages: object) -> int:
        text = str(messages)
        if "999" in text:
            raise ValueError("no user may say 999")
        return 9 if "8+1" in text else 8

    path = parquet(tmp_path / "rows.parquet", row(0), row(8), row(999))
    assert look(path).counts == {}
    findings = look(path, count_tokens=count)
    assert places(findings) == [("long_prompt", 2, "prompt"), ("refused_prompt", 3, "prompt")]
    assert findings.kept[0].text == "9 tokens, over the limit of 8"
    assert findings.longest_prompt == 9


def test_each_ground_truth_is_read_once_and_told_at_every_row(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def unread(truths: list[str]) -> list[str]:
        asked.append(truths)
        return ["no number" if truth == "x" else "" for truth in truths]

    rows = [truth("1", 0), truth("x", 1), truth("1", 2), truth("x", 3), truth(None, 4)]
    findings = look(parquet(tmp_path / "rows.parquet", *rows), unread=unread)
    assert asked == [["1", "x"]]
    assert [f for f in findings.kept if f.kind == "unreadable_truth"] == [
        Finding(kind="unreadable_truth", row=number, field="reward_model.ground_truth", text='"x": no number')
        for number in (2, 4)
    ]


def test_all_are_counted_and_the_first_are_kept(tmp_path: Path) -> None:
    findings = look(parquet(tmp_path / "rows.parquet", *(row(0) for _ in range(30))), max_kept=5)
    assert findings.counts == {"duplicate_prompt": 29}
    assert [finding.row for finding in findings.kept] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_named(tmp_path: Path, what: str) -> None:
    name, make, words = BROKEN[what]
    findings = look(make(tmp_path / name))
    told = " ".join(f"row {finding.row}: {finding.text}" for finding in findings.kept)
    for word in words:
        assert word in told
    assert set(findings.counts) <= set(KINDS)


def test_only_a_file_that_can_be_a_data_set_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.parquet is not a file"):
        look(tmp_path / "absent.parquet")
    (tmp_path / "rows.csv").write_text(json.dumps(row()))
    with pytest.raises(ValueError, match=r"ends in '\.csv'"):
        look(tmp_path / "rows.csv")
