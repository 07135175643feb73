"""The head's log-probabilities beside the plain computation: memory and time of a forward and a backward pass.

Each side is a process of its own, on the same inputs: 4,096 tokens, a vocabulary of 151,936, hidden size 1,024, softcap
and temperature, float32.

    bin/python coordinator -m benchmarks.fused_logprob
"""

import sys
from math import isclose
from statistics import median

import msgspec
from benchmarks.sides import FOLDER, ROOT, Bench, SideFailed

OUT = {side: FOLDER / f"logprob-{side}.json" for side in ("plain", "fused")}
NUM_ROUNDS = 2
MAX_MEMORY, MAX_TIME = 0.1, 1.3
TOLERANCE = 1e-5
"""Of the gradients' norms, which sum up 160 million numbers."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `benchmarks.logprob_side` writes."""

    forward_s: float
    backward_s: float
    processor_s: float
    """Of both, on all cores: what it would take on a machine that does nothing else."""
    peak_bytes: int
    mean_logprob: float
    hidden_gradient_norm: float
    weight_gradient_norm: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def found(self) -> tuple[float, float, float]:
        return self.mean_logprob, self.hidden_gradient_norm, self.weight_gradient_norm


class FusedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    fused_logprob_memory: float
    """Peak above the inputs, both gradients counted, as a share of the plain one's."""
    fused_logprob_time: float
    """Forward and backward, as a multiple of the plain one's: the median over rounds."""
    fused_logprob: dict[str, list[Measured]]
    """Every round of both sides."""


def measure(bench: Bench) -> FusedFigures:
    """Run both sides in turn. Raises SideFailed; ValueError where they find different numbers."""
    rounds: dict[str, list[Measured]] = {side: [] for side in OUT}
    for _ in range(NUM_ROUNDS):
        for side, out in OUT.items():
            (ROOT / out).unlink(missing_ok=True)
            bench.run(["bin/python", "trainer", "-m", "benchmarks.logprob_side", f"--side={side}", f"--out={out}"])
            rounds[side].append(msgspec.json.decode((ROOT / out).read_bytes(), type=Measured))
    return compare(rounds)


def compare(rounds: dict[str, list[Measured]]) -> FusedFigures:
    """The ratios. Raises ValueError where the sides find different numbers."""
    pairs = list(zip(rounds["plain"], rounds["fused"], strict=True))
    for plain, fused in pairs:
        if not all(isclose(*both, rel_tol=TOLERANCE) for both in zip(fused.found, plain.found, strict=True)):
            raise ValueError(f"fused log-probabilities or gradients differ: {fused.found}, plainly {plain.found}")
    return FusedFigures(
        fused_logprob_memory=max(fused.peak_bytes for _, fused in pairs) / min(plain.peak_bytes for plain, _ in pairs),
        fused_logprob_time=median(fused.seconds / plain.seconds for plain, fused in pairs),
        fused_logprob=rounds,
    )


def rows(figures: FusedFigures) -> list[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("fused_logprob_memory", f"{figures.fused_logprob_memory:.3f} x", f"of plain; goal: at most {MAX_MEMORY} x"),
        ("fused_logprob_time", f"{figures.fused_logprob_time:.2f} x", f"of plain; goal: at most {MAX_TIME} x"),
        *(
            (f"  {side}", f"{_peak(found) / 2**20:,.0f} MiB", _line(found))
            for side, found in figures.fused_logprob.items()
        ),
    ]


def _peak(found: list[Measured]) -> int:
    return max(each.peak_bytes for each in found)


def _line(found: list[Measured]) -> str:
    names = ("forward_s", "backward_s", "processor_s")
    forward, backward, processor = (median(getattr(each, name) for each in found) for name in names)
    return f"forward {forward:.1f} s, backward {backward:.1f} s; {processor:.1f} s of processor time"


def main() -> int:
    """Print the table."""
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(Bench())
    except (SideFailed, ValueError) as error:
        print(f"fused_logprob: {error}", file=sys.stderr)
        return 1
    for name, figure, remark in rows(figures):
        print(f"{name:<22}{figure:>11}  {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
