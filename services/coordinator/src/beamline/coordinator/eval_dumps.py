"""`evals/global_step_N/<data source>.jsonl`: every completion of an evaluation, to be read by people."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from beamline.coordinator.summary import write_atomically
from beamline.protocol.errors import ConfigError


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sampled answer and its grade."""

    prompt_id: str
    sample: int
    """Index among the problem's samples."""
    prompt: str
    """As a person reads it."""
    completion: str
    ground_truth: str
    reward: float | None
    """None when the grader abstained."""
    correct: bool
    pred: str = ""
    """What the grader read as the answer."""
    why: str = ""
    """Reason of an abstention, or of a grade that needs one."""
    response_length: int
    """Tokens."""
    finish_reason: str


def dump_path(evals_dir: Path, step: int, name: str) -> Path:
    """Where the completions of a data source lie. Characters that a file name should not have become `_`."""
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".") or "_"
    return evals_dir / f"global_step_{step}" / f"{stem}.jsonl"


def write_completions(path: Path, completions: Iterable[Completion | dict[str, Any]]) -> None:
    """Write all completions as one whole file, a line each.

    Raises:
        ConfigError: one of them lacks a field, has an unknown one, or a reward that is not a finite number.
    """
    lines = [msgspec.json.encode(_checked(path, completion)) for completion in completions]
    write_atomically(path, b"".join(line + b"\n" for line in lines))


def read_completions(path: Path) -> list[Completion]:
    """Raises ConfigError naming the file and the line that is not a completion."""
    completions: list[Completion] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            completions.append(msgspec.json.decode(line, type=Completion))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number} is not a completion ({error}): delete that line") from error
    return completions


def _checked(path: Path, completion: Completion | dict[str, Any]) -> Completion:
    try:
        checked = msgspec.convert(completion, Completion)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a completion for {path} is malformed: {error}") from error
    if checked.reward is not None and not math.isfinite(checked.reward):
        raise ConfigError(
            f"a completion for {path} has reward={checked.reward}: use a finite number, or None to abstain"
        )
    return checked
