"""The names of an expression are found whatever stands around them."""

import pytest

from promql import names_in


@pytest.mark.parametrize(
    ("expression", "metrics", "labels"),
    [
        ("up", {"up"}, set()),
        ('rate(a_total{job="b", x!~"c{d}"}[5m]) > 0.5e3', {"a_total"}, {"job", "x"}),
        ("sum by (worker, run) (a) / on (run) group_left (b) c", {"a", "c"}, {"worker", "run", "b"}),
        ("sum(a) without (le)", {"a"}, {"le"}),
        ("min_over_time(a[5m:1m]) > max_over_time(a[1h30m] offset 6m)", {"a"}, set()),
        ("a and b unless c or (d == bool e)", set("abcde"), set()),
        ("histogram_quantile(0.9, a) - -Inf # up\n* b @ end()", {"a", "b"}, set()),
        ("label_values(a, run)", {"a", "run"}, set()),
    ],
)
def test_metrics_and_labels(expression: str, metrics: set[str], labels: set[str]):
    found = names_in(expression)
    assert (found.metrics, found.labels) == (metrics, labels)


@pytest.mark.parametrize("expression", ["sum(a", "a)", "a $ b", 'a{b="c}'])
def test_what_is_no_expression_is_refused(expression: str):
    with pytest.raises(ValueError, match=r"PromQL|open"):
        names_in(expression)
