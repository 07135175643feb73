"""Runs every test with the interpreter of the part it concerns, lint first; fails if anything failed.

`ENVIRONMENTS` says which interpreter a folder needs, `TWICE` where a second one runs it too. A test file that no folder
covers is an error, as is a missing interpreter: nothing is left out in silence.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

INTERPRETERS = {
    "coordinator": "services/coordinator/.venv/bin/python",
    "rollout": "services/rollout/.venv/bin/python",
    "reward": "services/reward/.venv/bin/python",
    "trainer": "services/trainer/.venv/bin/python",
    "reference": "tests/reference/.venv/bin/python",
}

ENVIRONMENTS = {
    "tests/style": "coordinator",
    "tests/contract": "coordinator",
    "tests/unit": "coordinator",
    "tests/unit/weights": "trainer",
    "tests/unit/losses": "trainer",
    "tests/unit/diskoptim": "trainer",
    "tests/unit/environments": "rollout",
    "tests/models/torch_free": "coordinator",
    "tests/models/transformers": "trainer",
    "tests/models/reference": "reference",
    "tests/bus": "coordinator",
    "tests/ring": "coordinator",
    "tests/reward": "reward",
    "tests/rollout": "rollout",
    "tests/trainer": "trainer",
    "tests/parity": "trainer",
    "tests/parity/rollout": "rollout",
    "tests/parity/reference": "reference",
    "tests/doctor": "coordinator",
    "tests/dashboard": "coordinator",
    "tests/e2e": "coordinator",
}
"""The longest folder that holds a test file counts. Run in this order: what fails fast comes first."""

TWICE = {"tests/models/transformers": "rollout"}
"""Folders that run in a second environment too: rollout and trainer have transformers of different versions."""


PARALLEL = ("tests/unit", "tests/ring", "tests/dashboard")
"""Folders whose tests need neither an engine nor the whole machine: two processes share them out."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One pytest run. Counts are tests; `code` is pytest's exit code."""

    folder: str
    code: int
    passed: int
    failed: int
    skipped: int
    seconds: float


def environment_of(file: Path) -> str | None:
    """The folder of the table that covers a test file."""
    folders = [str(parent) for parent in file.parents]
    return next((folder for folder in folders if folder in ENVIRONMENTS), None)


def collect() -> dict[str, list[Path]]:
    """Test files by the table's folder, in its order. Raises SystemExit naming what cannot be run."""
    files: dict[str, list[Path]] = {folder: [] for folder in ENVIRONMENTS}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = file.relative_to(ROOT)
        if ".venv" in relative.parts:
            continue
        folder = environment_of(relative)
        if folder is None:
            raise SystemExit(f"{relative} has no interpreter: add its folder to ENVIRONMENTS in tools/run_tests.py")
        files[folder].append(relative)
    used = {folder: found for folder, found in files.items() if found}
    for environment in {environment for folder in used for environment in environments(folder)}:
        path = INTERPRETERS[environment]
        if not os.access(ROOT / path, os.X_OK):
            raise SystemExit(f"{path} is missing: run `make test`, which sets it up")
    return used


def environments(folder: str) -> list[str]:
    """Whose interpreters run a folder of the table."""
    return [ENVIRONMENTS[folder], *([TWICE[folder]] if folder in TWICE else [])]


def run_folder(folder: str, environment: str, files: list[Path], report: Path) -> Outcome:
    """One pytest process over the files of a folder."""
    print(f"\n== {folder} ({environment})", flush=True)
    started = time.monotonic()
    workers = ["-n", "2"] if folder in PARALLEL else []
    command = [INTERPRETERS[environment], "-m", "pytest", "-q", *workers, f"--junitxml={report}", *map(str, files)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    total, failed, skipped = _counts(report)
    return Outcome(
        folder=folder,
        code=code,
        passed=total - failed - skipped,
        failed=failed,
        skipped=skipped,
        seconds=time.monotonic() - started,
    )


def _counts(report: Path) -> tuple[int, int, int]:
    """Tests, failures with errors, and skips of a JUnit file; a run that wrote none counts as one failure."""
    if not report.is_file():
        return 1, 1, 0
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(*names: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites for name in names)

    return total("tests"), total("failures", "errors"), total("skipped")


def summarise(outcomes: Iterable[Outcome], lint_failed: bool) -> int:
    """Print the table and the closing line; returns the exit code."""
    outcomes = list(outcomes)
    print("\n== summary")
    for outcome in outcomes:
        mark = "ok" if outcome.code == 0 else "FAILED"
        counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        print(f"{mark:<7}{outcome.folder:<28}{counts:<40}{outcome.seconds:6.0f} s")
    if lint_failed:
        print("FAILED lint")
    passed, failed, skipped = (sum(getattr(o, name) for o in outcomes) for name in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return int(lint_failed or any(outcome.code for outcome in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="only folders that begin with one of these, such as tests/unit")
    parser.add_argument("--no-lint", action="store_true", help="only the tests")
    arguments = parser.parse_args()
    files = collect()
    folders = [f for f in files if not arguments.folders or f.startswith(tuple(arguments.folders))]
    if not folders:
        raise SystemExit(f"no folder begins with {' or '.join(arguments.folders)}: known are {', '.join(files)}")
    chosen = [(folder, environment) for folder in folders for environment in environments(folder)]
    lint_failed = not arguments.no_lint and subprocess.run([ROOT / "tools/lint.sh"], check=False).returncode != 0
    with tempfile.TemporaryDirectory() as reports:
        outcomes = [run_folder(f, e, files[f], Path(reports) / f"{n}.xml") for n, (f, e) in enumerate(chosen)]
    return summarise(outcomes, lint_failed)


if __name__ == "__main__":
    sys.exit(main())
