"""Packing: what of a trainer's work is padding, and how evenly ranks share it, on the lengths of real sequences.

Lengths are those of the demo's sampled answers, which a run of its recipe has kept of an evaluation, and of GSM8K's
worked answers. They are cut into mini-batches as the trainer cuts them: over the ranks, then into micro-batches under a
budget, of which every rank gets as many. Beside that stands what is usual without packing: sequences in the order in
which they come, each micro-batch padded to its longest.

    bin/python coordinator -m benchmarks.packing
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.sides import FOLDER, ROOT, Bench, SideFailed

from beamline.algorithms.packing import balance, micro_batches
from beamline.models.chat import ChatTokenizer

RUN = FOLDER / "packing"
DUMP = "evals/global_step_2/chained-sums.jsonl"
GSM8K = (ROOT.parent / "shared/data/gsm8k-train.jsonl", ROOT / "tests/data/gsm8k-sample.jsonl")
"""The whole set where it is there, else the part that comes with the code."""
MINI_BATCH = 128
"""Trajectories of an update, as in the demo's recipe."""
NUM_RANKS = (1, 2, 4, 8)
TENSOR = 4
"""Tensor-parallel ranks split a micro-batch's rows evenly, so its tokens are filled up to a multiple."""
BUDGETS = (2, 4, 16)
"""Micro-batch budgets, in multiples of the longest sequence."""


@dataclass(frozen=True)
class Cut:
    """A mini-batch as it was cut."""

    num_tokens: int
    num_padding: int
    heaviest_rank: float
    """Tokens of the rank with the most, as a multiple of the mean."""

    @property
    def waste(self) -> float:
        return self.num_padding / (self.num_tokens + self.num_padding)


class PackingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    packing_waste: float
    """Padding among the tokens computed: the largest share over all layouts and budgets."""
    packing_waste_padded: float
    """The same when every micro-batch is padded to its longest instead."""
    packing_heaviest_rank: float
    """Of the worst mini-batch; a multiple of the mean."""
    packing_step_waste: float
    """What the demo's trainer says of its own steps."""
    packing_lengths: dict[str, list[int]]
    """By source: number of sequences, and shortest, mean and longest of their lengths in tokens."""


def measure(bench: Bench) -> PackingFigures:
    """Run the demo for two steps, and cut. Raises SideFailed."""
    command = ["bin/beamline", "run", "tiny-beam", f"run.dir={RUN.parent}", f"run.name={RUN.name}"]
    bench.run([*command, "trainer.num_steps=2", "trainer.eval_interval=2", "--overwrite"])
    chat = ChatTokenizer.load(ROOT / RUN / "model")
    return figures_of(
        {"chained-sums": sampled_lengths(ROOT / RUN / DUMP, chat), "gsm8k": worked_lengths(chat)},
        step_waste=max(step_metric(ROOT / RUN / "metrics.jsonl", "packing/waste")),
    )


def figures_of(lengths: dict[str, list[int]], step_waste: float) -> PackingFigures:
    """Every source in every layout and under every budget."""
    cuts: list[Cut] = []
    padded: list[float] = []
    for lengths_N in lengths.values():
        budgets = [times * max(lengths_N) for times in BUDGETS]
        whole = len(lengths_N) - len(lengths_N) % MINI_BATCH or len(lengths_N)
        batches = [lengths_N[start : start + MINI_BATCH] for start in range(0, whole, MINI_BATCH)]
        cuts += [packed(*how) for how in itertools.product(batches, NUM_RANKS, budgets)]
        padded += [padded_waste(lengths_N, budget) for budget in budgets]
    return PackingFigures(
        packing_waste=max(cut.waste for cut in cuts),
        packing_waste_padded=max(padded),
        packing_heaviest_rank=max(cut.heaviest_rank for cut in cuts),
        packing_step_waste=step_waste,
        packing_lengths={
            name: [len(column), min(column), sum(column) // len(column), max(column)]
            for name, column in lengths.items()
        },
    )


def packed(lengths_N: Sequence[int], num_ranks: int, max_tokens: int) -> Cut:
    """As the trainer does it: balanced ranks, micro-batches under the budget, as many on each rank."""
    shares = [[lengths_N[i] for i in part] for part in balance(lengths_N, num_ranks)]
    needed = max(len(micro_batches(share, max_tokens)) for share in shares)
    num_padding = 0
    for share in shares:
        for part in micro_batches(share, max_tokens, needed):
            num_tokens = sum(share[i] for i in part)
            num_padding += -(num_tokens or 1) % TENSOR + (not num_tokens)  # an empty one computes a single token
    tokens_R = [sum(share) for share in shares]
    return Cut(sum(tokens_R), num_padding, max(tokens_R) * num_ranks / sum(tokens_R))


def padded_waste(lengths_N: Sequence[int], max_tokens: int) -> float:
    """Share of padding when sequences come as they are and each micro-batch is as wide as its longest."""
    computed = sum(len(rows) * max(rows) for rows in _rows_in_order(lengths_N, max_tokens))
    return 1 - sum(lengths_N) / computed


def _rows_in_order(lengths_N: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    rows: list[int] = []
    for length in lengths_N:
        if rows and (len(rows) + 1) * max(*rows, length) > max_tokens:
            yield rows
            rows = []
        rows = [*rows, length]
    yield rows


def sampled_lengths(dump: Path, chat: ChatTokenizer) -> list[int]:
    """Prompt and response tokens of every sample of an evaluation."""
    samples = _json_lines(dump)
    return [
        len(chat.encode_chat([{"role": "user", "content": sample["prompt"]}])) + sample["response_length"]
        for sample in samples
    ]


def worked_lengths(chat: ChatTokenizer) -> list[int]:
    """Of GSM8K: prompt tokens, and those of the answer that comes with it."""
    rows = _json_lines(next(path for path in GSM8K if path.is_file()))
    return [
        len(chat.encode_chat([{"role": "user", "content": row["question"]}])) + len(chat.encode(row["answer"]))
        for row in rows
    ]


def step_metric(metrics: Path, name: str) -> list[float]:
    """A metric's value in each step that has it."""
    return [line["values"][name] for line in _json_lines(metrics) if name in line["values"]]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def rows(figures: PackingFigures) -> list[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("packing_waste", f"{figures.packing_waste:.2%}", "padding among computed tokens; goal: below 5%"),
        ("packing_waste_padded", f"{figures.packing_waste_padded:.1%}", "each micro-batch padded to its longest"),
        (
            "packing_heaviest_rank",
            f"{figures.packing_heaviest_rank:.3f} x",
            "the mean; goal: at most 1.1 x",
        ),
        ("packing_step_waste", f"{figures.packing_step_waste:.2%}", "as the demo's trainer counts it"),
        *(
            (f"  {name}", f"{number:,}", f"sequences of {shortest} to {longest} tokens, {mean} on average")
            for name, (number, shortest, mean, longest) in figures.packing_lengths.items()
        ),
    ]


def main() -> int:
    """Print the table."""
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(Bench())
    except SideFailed as error:
        print(f"packing: {error}", file=sys.stderr)
        return 1
    for name, figure, remark in rows(figures):
        print(f"{name:<24}{figure:>10}  {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
