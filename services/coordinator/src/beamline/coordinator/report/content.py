"""What the report says beside its charts: headline figures, the ledger's sum, completions as examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beamline.coordinator.eval_dumps import Completion
from beamline.coordinator.summary import LedgerCounts, Summary

NUM_EXAMPLES = 4
"""Problems shown for a data source: the first ones of its dump, so that nobody picks them."""

STEP_COLUMNS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/accuracy", "accuracy", "{:.3f}"),
    ("tokens/response_mean", "length", "{:.1f}"),
    ("policy/mismatch_abs_mean", "mismatch", "{:.1e}"),
    ("policy/loss", "loss", "{:.4f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("policy/grad_norm", "grad norm", "{:.3f}"),
    ("policy/lr", "lr", "{:.1e}"),
    ("timing/generate", "generate s", "{:.2f}"),
    ("timing/train", "train s", "{:.2f}"),
    ("timing/sync", "sync s", "{:.2f}"),
    ("timing/step", "step s", "{:.2f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("data/epoch", "epochs", "{:.3f}"),
    ("data/dropped_prompts", "too long", "{:.0f}"),
)

type Dumps = Mapping[tuple[int, str], Sequence[Completion]]
"""Completions by step and data source."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class End:
    """A term of the ledger's sum; `share` of the issued groups in [0, 1]."""

    name: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem's same sample at each step that is shown."""

    prompt: str
    ground_truth: str
    answers: list[tuple[int, Completion]]
    """With the step."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    name: str
    steps: list[int]
    """The first and the last that were evaluated, or the only one."""
    problems: list[Example]


def tiles(summary: Summary) -> list[Tile]:
    """The headline, most important first."""
    steps = [step for step in summary.steps if "timing/step" in step.values]
    gaps = [step.values["policy/mismatch_abs_mean"] for step in steps if "policy/mismatch_abs_mean" in step.values]
    found = [_accuracy_tile(summary, name) for name in evaluation_names(summary)]
    found.append(Tile(label="steps", value=str(len(steps)), note=f"in {duration(summary.duration_s)}"))
    if summary.tokens_per_s is not None:
        found.append(
            Tile(label="tokens/s", value=f"{summary.tokens_per_s:,.0f}", note="prompt and response, over all steps")
        )
    if gaps:
        found.append(Tile(label="largest mismatch", value=f"{max(gaps):.1e}", note="mean |old − rollout| of a step"))
    return found


def ledger_ends(ledger: LedgerCounts) -> list[End]:
    """Where the issued groups went; the counts add up to `issued` when the ledger closes."""
    names = ("trained", "filtered", "stale", "failed", "in_flight")
    counts = {name: getattr(ledger, name) for name in names}
    total = max(1, sum(counts.values()))
    return [
        End(name=name.replace("_", " "), count=count, share=count / total)
        for name, count in counts.items()
        if count or name != "in_flight"
    ]


def evaluation_table(summary: Summary) -> Table:
    """One row an evaluation: accuracy with its interval, and every other value."""
    folded = ("accuracy", "accuracy_low", "accuracy_high")
    others = list(dict.fromkeys(k for e in summary.evaluations for k in e.values if k not in folded))
    return Table(
        header=["step", "evaluation", "accuracy", "95 % interval", *(name.replace("_", " ") for name in others)],
        rows=[
            [
                str(evaluation.step),
                evaluation.name,
                _percent(evaluation.values.get("accuracy")),
                _interval(evaluation.values),
                *(_plain(evaluation.values.get(name)) for name in others),
            ]
            for evaluation in summary.evaluations
        ],
    )


def step_table(summary: Summary) -> Table:
    """One row a step, of those columns that the run has."""
    columns = [column for column in STEP_COLUMNS if any(column[0] in step.values for step in summary.steps)]
    return Table(
        header=["step", *(label for _, label, _ in columns)],
        rows=[
            [
                str(step.step),
                *(form.format(step.values[metric]) if metric in step.values else "–" for metric, _, form in columns),
            ]
            for step in summary.steps
        ],
    )


def examples(summary: Summary, dumps: Dumps) -> list[Examples]:
    """For each evaluated data source: its first problems, first sample, at the first and at the last step."""
    return [found for name in evaluation_names(summary) if (found := _examples(summary, name, dumps)) is not None]


def evaluation_names(summary: Summary) -> list[str]:
    return list(dict.fromkeys(evaluation.name for evaluation in summary.evaluations))


def duration(seconds: float) -> str:
    """Such as "48 s", "12 min 5 s" or "3 h 20 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _examples(summary: Summary, name: str, dumps: Dumps) -> Examples | None:
    dumped = [e.step for e in summary.evaluations if e.name == name and (e.step, name) in dumps]
    steps = sorted({*dumped[:1], *dumped[-1:]})
    samples = {step: _first_samples(dumps[step, name]) for step in steps}
    shared = [problem for problem in samples[steps[0]] if problem in samples[steps[-1]]] if steps else []
    problems: list[Example] = []
    for problem in shared[:NUM_EXAMPLES]:
        answers = [(step, samples[step][problem]) for step in steps]
        shown = answers[0][1]
        problems.append(Example(prompt=shown.prompt, ground_truth=shown.ground_truth, answers=answers))
    return Examples(name=name, steps=steps, problems=problems) if problems else None


def _first_samples(completions: Sequence[Completion]) -> dict[str, Completion]:
    """The lowest sample of each problem, problems in order of their ids."""
    ordered = sorted(completions, key=lambda completion: (completion.prompt_id, -completion.sample))
    return {completion.prompt_id: completion for completion in ordered}


def _accuracy_tile(summary: Summary, name: str) -> Tile:
    told = [e.values for e in summary.evaluations if e.name == name and "accuracy" in e.values]
    if not told:
        return Tile(label=name, value="–", note="no accuracy recorded")
    first, last = told[0]["accuracy"], told[-1]["accuracy"]
    interval = _interval(told[-1])
    note = f"95 % interval {interval}" if interval != "–" else ""
    if len(told) == 1:
        return Tile(label=f"{name} accuracy", value=_percent(last), note=note)
    return Tile(label=f"{name} accuracy", value=f"{100 * first:.1f} → {_percent(last)}", note=note)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _interval(values: Mapping[str, float]) -> str:
    if "accuracy_low" not in values or "accuracy_high" not in values:
        return "–"
    return f"{100 * values['accuracy_low']:.1f} – {100 * values['accuracy_high']:.1f} %"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
