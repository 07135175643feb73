"""The data sets that can be prepared: where each is published, and how its question and answer become a prompt row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from beamline.models.datasets import PromptRow, text_faults

INSTRUCTION = "Work through the problem step by step. Write the result on a last line of its own, as Answer: N."


@dataclass(frozen=True, kw_only=True)
class Source:
    """One published data set."""

    data_source: str
    hub: str
    """`owner/name` on the hub, where need be with the folder of the variant that is meant."""
    answer: Callable[[Any], str] | None = None
    """The ground truth of a published answer; None where the set is published in DAPO's layout alone."""
    splits: tuple[str, ...] = ("test",)
    file_stem: str = ""
    """Of the prepared file, where it is not the set's name."""


def _last_number(answer: Any) -> str:
    """GSM8K: the number after the last `####`, without thousands commas."""
    _, mark, result = str(answer).rpartition("####")
    result = result.strip().replace(",", "")
    if not mark or not result:
        raise ValueError("no result after '####'")
    return result


def _competition_integer(answer: Any) -> str:
    """AIME: an integer from 0 to 999, published with or without leading zeros, an angle perhaps with its degrees."""
    text = str(answer).strip().removesuffix(r"^\circ")
    if not text.isdecimal() or len(text) > 3:
        raise ValueError("not an integer from 0 to 999")
    return str(int(text))


def _expression(answer: Any) -> str:
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("not a LaTeX expression")
    return answer.strip()


SOURCES: Mapping[str, Source] = {
    "dapo": Source(
        data_source="math_dapo",
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        splits=("train",),
        file_stem="dapo-math-17k",
    ),
    # The published DAPO files call AIME 2024 by the name of its grader, and metrics follow them.
    "aime-2024": Source(data_source="math_dapo", hub="BytedTsinghua-SIA/AIME-2024", answer=_competition_integer),
    "aime-2025": Source(data_source="aime-2025", hub="math-ai/aime25", answer=_competition_integer),
    "gsm8k": Source(data_source="gsm8k", hub="openai/gsm8k/main", answer=_last_number, splits=("train", "test")),
    "math-500": Source(data_source="math-500", hub="HuggingFaceH4/MATH-500", answer=_expression),
}


def find_source(name: str) -> Source:
    """Raises ValueError naming the known sets."""
    if name not in SOURCES:
        raise ValueError(f"data set {name!r} is not known: use one of {', '.join(SOURCES)}")
    return SOURCES[name]


def choose_split(name: str, split: str | None, hint: str = "") -> str:
    """The split that is asked for, else the one that `hint` (a file's name) mentions, else the set's first.

    Raises ValueError: the set has no such split.
    """
    splits = find_source(name).splits
    if split and split not in splits:
        raise ValueError(f"data set {name} has no split {split!r}: use one of {', '.join(splits)}")
    return split or next((known for known in splits if known in hint), splits[0])


def prepared_name(name: str, split: str) -> str:
    """Name of the file that preparation writes, such as `gsm8k-train-cleaned.parquet`."""
    source = find_source(name)
    suffix = f"-{split}" if len(source.splits) > 1 else ""
    return f"{source.file_stem or name}{suffix}-cleaned.parquet"


def convert(source: Source, split: str, number: int, raw: Mapping[str, Any]) -> PromptRow:
    """A row of question and answer, `number` from 1, as a prompt with the instruction before it.

    Raises:
        ValueError: a question or answer that is missing or of another form; names the field.
    """
    assert source.answer is not None
    lowered = {key.lower(): value for key, value in raw.items()}
    name = "problem" if "problem" in lowered else "question"
    for fault in text_faults(lowered, name):
        raise ValueError(str(fault))
    try:
        ground_truth = source.answer(lowered.get("answer"))
    except ValueError as error:
        shown = repr(lowered.get("answer"))
        raise ValueError(f"field 'answer' is {shown[:80]}, expected another form: {error}") from error
    return PromptRow(
        data_source=source.data_source,
        messages=({"role": "user", "content": f"{INSTRUCTION}\n\n{lowered[name].strip()}"},),
        ground_truth=ground_truth,
        index=number - 1,
        split=split,
    )
