"""A comparison in a terminal: plain sentences first, then tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from beamline.coordinator.compare import Comparison, Difference, Score, SetComparison
from beamline.coordinator.eval_table import interval, percent

_NOTHING = "–"


def sentences(comparison: Comparison) -> list[str]:
    """One for each set; what can be told apart comes first."""
    told = sorted(comparison.sets, key=lambda found: found.difference is None or not found.difference.significant)
    if not told:
        return ["Neither run has evaluated anything, so their accuracies cannot be compared."]
    return [_sentence(comparison, found) for found in told]


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print everything."""
    for sentence in sentences(comparison):
        console.print(sentence)
    for title, table in (
        ("accuracy", _accuracy_table(comparison)),
        ("difference", _difference_table(comparison)),
        ("figures", _table(["figure", *_names(comparison)], _figure_rows(comparison))),
        ("settings that differ", _table(["setting", *_names(comparison)], _setting_rows(comparison))),
    ):
        if table.row_count:
            console.print(f"\n{title}", style="bold")
            console.print(table)


def _sentence(comparison: Comparison, found: SetComparison) -> str:
    first, second = _names(comparison)
    difference = found.difference
    if difference is None:
        return f"No comparison on {found.name}: {found.why_not}."
    mean, low, high = difference.mean, difference.low, difference.high
    evidence = f"{_p_value(difference.p_value)}, paired over {_problems(difference)}"
    if not difference.significant:
        lead = f"{second} less {first}: {_points(mean)} points, 95 %: {_points(low)} to {_points(high)}"
        return f"No difference can be told on {found.name} ({lead}, {evidence})."
    if mean < 0:
        first, second, mean, low, high = second, first, -mean, -high, -low
    lead = f"95 %: {_points(low)} to {_points(high)}"
    return f"{second} is better on {found.name} than {first} by {_points(mean)} points ({lead}, {evidence})."


def _problems(difference: Difference) -> str:
    paired, first, second = difference.num_problems, difference.num_first, difference.num_second
    noun = "problem" if paired == 1 else "problems"
    return f"{paired} {noun}" if paired == first == second else f"{paired} {noun}, of {first} and {second}"


def _points(share: float) -> str:
    """Percentage points with a sign where they are negative."""
    text = f"{100 * share:.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _p_value(p_value: float) -> str:
    return "p < 0.0001" if p_value < 1e-4 else f"p = {p_value:.2g}"


def _accuracy_table(comparison: Comparison) -> Table:
    rows = [
        [found.name, name, *_score_cells(scores.final), *_score_cells(scores.best)]
        for found in comparison.sets
        for name, scores in zip(_names(comparison), (found.first, found.second), strict=True)
        if scores is not None
    ]
    return _table(["evaluation", "run", "last", "95 %", "at step", "best", "95 %", "at step"], rows)


def _score_cells(score: Score) -> list[str]:
    return [percent(score.accuracy), interval(score.low, score.high), str(score.step)]


def _difference_table(comparison: Comparison) -> Table:
    rows = [
        [
            found.name,
            _points(found.difference.mean),
            f"{_points(found.difference.low)} to {_points(found.difference.high)}",
            _p_value(found.difference.p_value).removeprefix("p ").removeprefix("= "),
            str(found.difference.num_problems),
            found.difference.test,
        ]
        for found in comparison.sets
        if found.difference is not None
    ]
    lead = f"{comparison.second} − {comparison.first}"
    return _table(["evaluation", f"{lead}, points", "95 %", "p", "problems", "test"], rows)


def _figure_rows(comparison: Comparison) -> list[list[str]]:
    return [[figure.name, _number(figure.first), _number(figure.second)] for figure in comparison.figures]


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _setting_rows(comparison: Comparison) -> list[list[str]]:
    return [[setting.key, _value(setting.first), _value(setting.second)] for setting in comparison.settings]


def _value(value: object) -> str:
    return _NOTHING if value is None else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*header, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def _names(comparison: Comparison) -> tuple[str, str]:
    return comparison.first, comparison.second
