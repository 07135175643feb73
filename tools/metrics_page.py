"""Writes the tables of docs/metrics.md from the metric schema; the prose between them stays as it is.

    services/coordinator/.venv/bin/python tools/metrics_page.py [--check]

Each second-level heading is the first part of its metrics' names; its table stands where one stood, or at the end.
"""

import argparse
import itertools
import re
import sys
from pathlib import Path

from beamline.protocol.metric_schema import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = "| name | kind | unit | owner | meaning |\n|---|---|---|---|---|"
_HEADING = re.compile(r"^## (\S+)$", flags=re.MULTILINE)
_TABLE = re.compile(r"^\|.*\n?", flags=re.MULTILINE)


def table(section: str) -> str:
    """The rows of one section, in the schema's order."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {metric.owner} | {metric.meaning} |"
        for metric in METRICS
        if metric.section == section
    ]
    return "\n".join([HEAD, *rows])


def page(text: str) -> str:
    """The page with its tables made anew. Raises SystemExit where sections of schema and page are not the same."""
    opening, *parts = _HEADING.split(text)
    bodies = dict(itertools.batched(parts, 2))
    missing = {metric.section for metric in METRICS} ^ bodies.keys()
    if missing:
        sys.exit(f"{PAGE.name} and the schema must have the same sections; only one has {', '.join(sorted(missing))}")
    return opening + "\n".join(f"## {section}\n\n{_body(section, body)}" for section, body in bodies.items())


def _body(section: str, body: str) -> str:
    before, _, after = _TABLE.sub("\0", body, count=1).partition("\0")
    prose = [part.strip() for part in (before, _TABLE.sub("", after))]
    return "\n\n".join(part for part in (prose[0], table(section), prose[1]) if part) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tables of docs/metrics.md from the metric schema.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    written = PAGE.read_text()
    made = page(written)
    if parser.parse_args().check:
        sys.exit(0 if made == written else f"{PAGE.name} is not what the schema says: run tools/metrics_page.py")
    PAGE.write_text(made)
