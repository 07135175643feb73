"""How fast the reward service grades, and what its processes cost beside the math-verify library used bare."""

from statistics import median

import msgspec
from benchmarks.sides import FOLDER, ROOT, Bench

OUT = FOLDER / "graders.json"
MIN_PER_MINUTE = 10_000
MAX_OVERHEAD = 0.20


class GradeSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What `benchmarks.grade_speed` writes: gradings a second of every round."""

    math_dapo: list[float]
    math_verify: list[float]
    math_verify_bare: list[float]


class GraderFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    math_dapo_per_minute: float
    math_verify_per_minute: float
    math_verify_bare_per_minute: float
    """The library in one process a core, without messages, pool or the possibility of being killed."""
    grader_overhead: float
    """Share of the bare rate that the service loses: the median over rounds."""


def measure(bench: Bench) -> GraderFigures:
    """Run all sides. Raises SideFailed."""
    (ROOT / OUT).unlink(missing_ok=True)
    bench.run(["bin/python", "reward", "-m", "benchmarks.grade_speed", f"--out={OUT}"])
    return compare(msgspec.json.decode((ROOT / OUT).read_bytes(), type=GradeSpeeds))


def compare(speeds: GradeSpeeds) -> GraderFigures:
    """Medians, and the overhead of each round by itself: a slow round is slow for both."""
    pairs = zip(speeds.math_verify, speeds.math_verify_bare, strict=True)
    return GraderFigures(
        math_dapo_per_minute=60 * median(speeds.math_dapo),
        math_verify_per_minute=60 * median(speeds.math_verify),
        math_verify_bare_per_minute=60 * median(speeds.math_verify_bare),
        grader_overhead=median(1 - pooled / bare for pooled, bare in pairs),
    )


def rows(figures: GraderFigures) -> list[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("math_dapo_per_minute", f"{figures.math_dapo_per_minute:,.0f}", f"goal: at least {MIN_PER_MINUTE:,}"),
        ("math_verify_per_minute", f"{figures.math_verify_per_minute:,.0f}", "gradings by the service"),
        ("math_verify_bare_per_minute", f"{figures.math_verify_bare_per_minute:,.0f}", "the library, a process a core"),
        ("grader_overhead", f"{figures.grader_overhead:.1%}", f"goal: at most {MAX_OVERHEAD:.1%}"),
    ]
