"""What it costs to look: a run's spans, and 200 subscribers with an open dashboard, as shares of a step of the demo.

Both are on in some steps of a run and off in the others. A step with them is compared with its nearest steps without,
so that neither a machine that slows down nor a policy that learns to answer shorter decides. By itself:
`bin/python coordinator -m benchmarks.telemetry`.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec
import numpy as np
from benchmarks.observers import NUM_SUBSCRIBERS, Looked
from benchmarks.sides import FOLDER, ROOT, Bench

from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.observe.spans import read_spans
from beamline.coordinator.summary import fold

TRACED_RUNS = ("traced-a", "traced-b")
NUM_TRACED_STEPS = 30
NUM_OBSERVED_STEPS = 40
SAMPLER = ("OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0.5")
"""By each step's trace id: half of the steps are traced by all services, the others by none."""
NUM_NEIGHBOURS = 2
"""On each side."""
NUM_RESAMPLES, SPREAD = 2000, (5.0, 95.0)


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """Median share of a step that something adds to it, with the middle nine tenths of its bootstrap."""

    share: float
    low: float
    high: float


class TelemetryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    telemetry_share: float
    """What spans in all services add to a step, as a share of it; the goal is 0.01 at most."""
    telemetry_share_interval: tuple[float, float]
    telemetry_cpu_share: float
    """Processor time of a step's spans in all services together, export included, as a share of the step: what they
    would add if nothing ran beside them."""
    spans_per_step: float
    span_us: float
    """Processor time of one span of a handler: context taken from headers, span, context into headers, its line."""
    observers_share: float
    """What 200 subscribers of all metrics and an open dashboard add to a step; the goal is 0.03 at most."""
    observers_share_interval: tuple[float, float]
    observers_cpu_share: float
    """Processor time that broker, subscribers and dashboard take more of a step that is looked at, as a share of it."""


def measure(bench: Bench) -> TelemetryFigures:
    """Three runs of the demo, and the cost of a span by itself. Raises SideFailed."""
    traced = [traced_run(bench, name) for name in TRACED_RUNS]
    spans = added([run.seconds for run in traced], [run.is_traced for run in traced])
    out = FOLDER / "span_cost.json"
    bench.run(["bin/python", "coordinator", "-m", "benchmarks.span_cost", f"--out={out}"])
    span_us = msgspec.json.decode((ROOT / out).read_bytes(), type=float)
    spans_per_step = median(run.spans_per_step for run in traced)
    step_s = median(second for run in traced for second in run.seconds)
    looked = observed_run(bench)
    observers = added([looked.seconds], [looked.is_looked_at])
    return TelemetryFigures(
        telemetry_share=spans.share,
        telemetry_share_interval=(spans.low, spans.high),
        telemetry_cpu_share=spans_per_step * span_us * 1e-6 / step_s,
        spans_per_step=spans_per_step,
        span_us=span_us,
        observers_share=observers.share,
        observers_share_interval=(observers.low, observers.high),
        observers_cpu_share=added_cpu(looked),
    )


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a run but the first, in order."""

    seconds: list[float]
    is_traced: list[bool]
    spans_per_step: float
    """Median over the traced ones."""


def traced_run(bench: Bench, name: str) -> Traced:
    """A run of the demo with half of its steps traced."""
    command = ["bin/beamline", "run", "tiny-beam", f"run.dir={FOLDER}", f"run.name={name}"]
    options = [f"trainer.num_steps={NUM_TRACED_STEPS}", "trainer.eval_interval=0", "--overwrite"]
    bench.run(["env", *SAMPLER, *command, *options])
    return read_traced(ROOT / FOLDER / name)


def read_traced(run_dir: Path) -> Traced:
    """What such a run has written down."""
    _, steps = fold(read_metrics(run_dir / "metrics.jsonl"))
    seconds = {step.step: step.values["timing/step"] for step in steps if "timing/step" in step.values}
    spans = list(read_spans(run_dir))
    roots = {span.trace_id: int(span.attributes["beamline.step"]) for span in spans if span.name == "step"}
    counts = dict.fromkeys(roots.values(), 0)
    for span in spans:
        if span.trace_id in roots:
            counts[roots[span.trace_id]] += 1
    kept = sorted(seconds)[1:]
    return Traced(
        seconds=[seconds[step] for step in kept],
        is_traced=[step in counts for step in kept],
        spans_per_step=median(counts.values()),
    )


def observed_run(bench: Bench) -> Looked:
    """A run of the demo that is looked at in every other block of steps."""
    out = FOLDER / "observed.json"
    (ROOT / out).unlink(missing_ok=True)
    options = [f"--folder={FOLDER}", f"--steps={NUM_OBSERVED_STEPS}", f"--out={out}"]
    bench.run(["bin/python", "coordinator", "-m", "benchmarks.observers", *options])
    return msgspec.json.decode((ROOT / out).read_bytes(), type=Looked)


def added_cpu(looked: Looked) -> float:
    """Median of the steps that were looked at, less that of the others."""
    pairs = list(zip(looked.cpu_shares, looked.is_looked_at, strict=True))
    with_them, without = ([share for share, on in pairs if on is wanted] for wanted in (True, False))
    return median(with_them) - median(without)


def added(seconds: Sequence[Sequence[float]], is_on: Sequence[Sequence[bool]]) -> Added:
    """What is added to the steps in which it is on.

    Args:
        seconds: of each step, by run, in order.
        is_on: in which of them it is on.

    Raises:
        ValueError: no step with it has steps without on both sides.
    """
    shares = [share for run in zip(seconds, is_on, strict=True) for share in _shares(*run)]
    if not shares:
        raise ValueError("no step with it lies between steps without it: run more steps")
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(shares, (NUM_RESAMPLES, len(shares))), axis=1)
    low, high = np.percentile(medians, SPREAD).tolist()
    return Added(share=median(shares), low=low, high=high)


def _shares(seconds: Sequence[float], is_on: Sequence[bool]) -> list[float]:
    """Of each step with it, what is left of 1 beside its nearest steps without."""
    off = [number for number, on in enumerate(is_on) if not on]
    found: list[float] = []
    for number in (number for number, on in enumerate(is_on) if on):
        before = [other for other in off if other < number][-NUM_NEIGHBOURS:]
        after = [other for other in off if other > number][:NUM_NEIGHBOURS]
        if before and after:
            beside = fmean([fmean(seconds[other] for other in side) for side in (before, after)])
            found.append(1 - beside / seconds[number])
    return found


def rows(figures: TelemetryFigures) -> list[tuple[str, str, str]]:
    """The table's lines."""

    def between(interval: tuple[float, float]) -> str:
        return f"between {interval[0]:.1%} and {interval[1]:.1%}"

    return [
        (
            "telemetry_share",
            f"{figures.telemetry_share:.1%}",
            f"of a step of the demo, {between(figures.telemetry_share_interval)}; goal: at most 1.0%",
        ),
        (
            "telemetry_cpu_share",
            f"{figures.telemetry_cpu_share:.2%}",
            f"{figures.spans_per_step:.0f} spans of {figures.span_us:.0f} us a step, if nothing ran beside them",
        ),
        (
            "observers_share",
            f"{figures.observers_share:.1%}",
            f"{NUM_SUBSCRIBERS} subscribers and a dashboard, {between(figures.observers_share_interval)}; "
            "goal: at most 3.0%",
        ),
        (
            "observers_cpu_share",
            f"{figures.observers_cpu_share:.2%}",
            "of a step, by broker, subscribers and dashboard, if nothing ran beside them",
        ),
    ]


if __name__ == "__main__":
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    for row in rows(measure(Bench())):
        print(*row, sep="  ")
