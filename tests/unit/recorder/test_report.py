"""The report: complete, self-contained, and safe with whatever a model writes."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from beamline.coordinator.eval_dumps import Completion
from beamline.coordinator.report.charts import phases_chart
from beamline.coordinator.report.content import examples, ledger_ends
from beamline.coordinator.report.page import render
from beamline.coordinator.summary import StepValues, Summary, read_summary

MAX_PAGE_BYTES = 2 * 2**20
HOSTILE = "</script></pre><script>window.owned = 1</script><img src=x onerror=alert(1)> & {{ 7 * 7 }}"


class Page(HTMLParser):
    """Elements and text of a page, scripts and styles apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.specs = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "specs":
            self.specs += data
        elif not self._inside:
            self.text += data


@pytest.fixture
def summary(finished_run: Path) -> Summary:
    return read_summary(finished_run / "summary.json")


@pytest.fixture
def page(finished_run: Path) -> Page:
    return Page((finished_run / "report.html").read_text())


def test_every_chart_has_its_place_and_its_data(page: Page):
    specs = json.loads(page.specs)
    places = [attributes["data-chart"] for _, attributes in page.tags if "data-chart" in attributes]
    assert sorted(places) == sorted(specs)
    assert {"accuracy", "reward-mean", "tokens-response_mean", "policy-mismatch_abs_mean", "phases"} <= set(specs)
    accuracy = specs["accuracy"]["data"]["values"]
    assert len(accuracy) == 10 and all(row["low"] < row["accuracy"] < row["high"] for row in accuracy)


def test_the_page_says_what_the_run_came_to(page: Page):
    text = " ".join(page.text.split())
    assert "30.0 → 83.6 %" in text
    assert "704 issued = 612 trained + 83 filtered + 0 stale + 9 failed" in text
    assert "The ledger closes" in text
    assert "trainer.optimizer.lr" in text and "megatron-core" in text


def test_the_page_asks_for_nothing_from_outside(page: Page, finished_run: Path):
    sources = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "srcset", "data")
    ]
    links = [attributes["href"] or "" for _, attributes in page.tags if "href" in attributes]
    assert sources == [] and not [link for link in links if ":" in link or link.startswith("/")]
    assert "link" not in {tag for tag, _ in page.tags}
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy
    assert not re.search(r"@import|url\(", (finished_run / "report.html").read_text().split("</style>")[0])
    assert (finished_run / "report.html").stat().st_size < MAX_PAGE_BYTES


def test_what_a_model_writes_stays_text(summary: Summary):
    name = summary.evaluations[0].name
    hostile = Completion(
        prompt_id="a",
        sample=0,
        prompt=HOSTILE,
        completion=HOSTILE,
        ground_truth=HOSTILE,
        reward=None,
        correct=False,
        pred=HOSTILE,
        why=HOSTILE,
        response_length=3,
        finish_reason="stop",
    )
    evil_source = [msgspec.structs.replace(e, name=HOSTILE) for e in summary.evaluations if e.name == name]
    summary = msgspec.structs.replace(summary, run=HOSTILE, evaluations=[*summary.evaluations, *evil_source])
    html = render(summary, {(0, name): [hostile], (20, name): [hostile]})
    page = Page(html)
    assert page.text.count(HOSTILE) >= 8
    assert "<script>window.owned" not in html
    assert not [tag for tag, attributes in page.tags if tag == "img" or "onerror" in attributes]
    assert any(row["source"] == HOSTILE for row in json.loads(page.specs)["accuracy"]["data"]["values"])


def test_examples_are_the_same_problem_before_and_after(summary: Summary):
    def answer(problem: str, sample: int, text: str) -> Completion:
        return Completion(
            prompt_id=problem,
            sample=sample,
            prompt=f"problem {problem}",
            completion=text,
            ground_truth="1",
            reward=1.0,
            correct=True,
            response_length=1,
            finish_reason="stop",
        )

    name = summary.evaluations[0].name
    before = [answer("b", 0, "old b"), answer("a", 1, "other"), answer("a", 0, "old a")]
    after = [answer("c", 0, "new c"), answer("a", 0, "new a"), answer("b", 0, "new b")]
    (found,) = examples(summary, {(0, name): before, (20, name): after, (10, name): []})
    assert found.steps == [0, 20]
    told = [[(step, completion.completion) for step, completion in problem.answers] for problem in found.problems]
    assert told == [[(0, "old a"), (20, "new a")], [(0, "old b"), (20, "new b")]]
    (alone,) = examples(summary, {(20, name): after})
    assert alone.steps == [20] and [len(problem.answers) for problem in alone.problems] == [1, 1, 1]


def test_a_run_that_only_evaluated_shows_its_answers_and_no_ledger(evaluated_run: Path):
    text = Page((evaluated_run / "report.html").read_text()).text
    assert "Answers" in text and "chained-sums: step 0" in text and "✗ wrong" in text
    assert "Where did every prompt group go?" not in text and "Before and after" not in text


def test_phases_add_up_to_the_step(summary: Summary):
    values = {"timing/generate": 2.0, "timing/train": 3.0, "timing/sync": 0.5, "timing/score": 9.0, "timing/step": 6.0}
    chart = phases_chart(msgspec.structs.replace(summary, steps=[StepValues(step=1, values=values)]))
    assert chart is not None
    rows = {row["phase"]: row["seconds"] for row in chart.spec["data"]["values"]}
    assert rows == pytest.approx({"generate": 2.0, "train": 3.0, "sync": 0.5, "other": 0.5})


def test_a_ledger_that_does_not_close_is_an_alarm(summary: Summary):
    open_ledger = msgspec.structs.replace(summary.ledger, trained=summary.ledger.trained - 2)
    assert sum(end.share for end in ledger_ends(open_ledger)) == pytest.approx(1.0)
    html = render(msgspec.structs.replace(summary, ledger=open_ledger), {})
    assert "does not close: 2 groups" in html and "The ledger closes" not in html


def test_the_report_is_made_again_from_what_the_run_left(finished_run: Path):
    first = (finished_run / "report.html").read_bytes()
    (finished_run / "report.html").unlink()
    (finished_run / "metrics.jsonl").unlink()
    command = [sys.executable, "-m", "beamline.coordinator.report"]
    subprocess.run([*command, str(finished_run)], check=True, timeout=120)
    assert (finished_run / "report.html").read_bytes() == first
    refused = subprocess.run(
        [*command, str(finished_run / "evals")], check=False, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 1 and "error: no " in refused.stderr


def test_every_metric_of_the_fixture_is_documented(summary: Summary, is_documented: Callable[[str], bool]):
    names = {metric for step in summary.steps for metric in step.values}
    names |= {f"eval/{e.name}/{value}" for e in summary.evaluations for value in e.values}
    assert sorted(name for name in names if not is_documented(name)) == []
    assert not is_documented("reward/unheard_of")
