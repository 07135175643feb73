"""Runs every test with the interpreter of the part it concerns, and lint; fails if anything failed.

`ENVIRONMENTS` says which interpreter a folder needs, `TWICE` where a second one runs it too. A test file that no folder
covers is an error, as is a missing interpreter: nothing is left out in silence. Most folders keep one core busy, so two
run at a time; those in `WHOLE` come after them, one by one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
    "tests/trainer": "trainer",
    "tests/parity/rollout": "rollout",
    "tests/rollout": "rollout",
    "tests/parity": "trainer",
    "tests/parity/reference": "reference",
    "tests/reward": "reward",
    "tests/bus": "coordinator",
    "tests/ring": "coordinator",
    "tests/doctor": "coordinator",
    "tests/dashboard": "coordinator",
    "tests/e2e": "coordinator",
}
"""The longest folder that holds a test file counts. They begin in this order: what fails fast comes first, and what
lasts longest before enough short ones to run beside it."""

TWICE = {"tests/models/transformers": "rollout"}
"""Folders that run in a second environment too: rollout and trainer have transformers of different versions."""

WHOLE = ("tests/unit", "tests/ring", "tests/doctor", "tests/dashboard", "tests/e2e")
"""Folders that keep every core busy by themselves: nothing runs beside them."""

PARALLEL = ("tests/unit", "tests/ring", "tests/dashboard", "tests/e2e")
"""Those of them that two processes share out: a whole run, too, keeps no more than half of two cores busy."""

AT_A_TIME = 2

_printing = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of the suite: a folder's tests, or lint."""

    name: str
    """A folder of the table, or `lint`."""
    environment: str
    """Whose interpreter runs it; lint has its own."""
    command: Sequence[str | Path]
    report: Path | None
    """Where pytest counts its tests; lint has none."""

    @property
    def title(self) -> str:
        """No other job's."""
        return f"{self.name} ({self.environment})"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One job's end. Counts are tests; `code` is the command's exit code."""

    name: str
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


def jobs_of(folders: dict[str, list[Path]], reports: Path, *, with_lint: bool) -> list[Job]:
    """Everything that is to run, lint first. Pytest's own counts go to files in `reports`."""
    jobs = [Job(name="lint", environment="tools", command=[ROOT / "tools/lint.sh"], report=None)] if with_lint else []
    for folder, files in folders.items():
        for environment in environments(folder):
            report = reports / f"{len(jobs)}.xml"
            workers = ["-n", "2"] if folder in PARALLEL else []
            pytest = [INTERPRETERS[environment], "-m", "pytest", "-q", *workers, f"--junitxml={report}"]
            jobs.append(Job(name=folder, environment=environment, command=[*pytest, *files], report=report))
    return jobs


def run_jobs(jobs: Sequence[Job]) -> list[Outcome]:
    """Run what leaves a core free two at a time, then the rest; outcomes come in the order of the jobs."""
    beside = [job for job in jobs if job.name not in WHOLE]
    outcomes: dict[str, Outcome] = {}
    if len(beside) > 1:
        pool = ThreadPoolExecutor(AT_A_TIME)
        try:
            running = {job.title: pool.submit(run_beside, job) for job in beside}
            outcomes = {title: outcome.result() for title, outcome in running.items()}
        finally:
            pool.shutdown(cancel_futures=True)
    return [outcomes.get(job.title) or run_alone(job) for job in jobs]


def run_alone(job: Job) -> Outcome:
    """Run a job whose output is seen while it comes."""
    print(f"\n== {job.title}", flush=True)
    return run_job(job, None, {})


def run_beside(job: Job) -> Outcome:
    """Run a job beside another one, with one thread: what it writes is shown when it has ended."""
    print(f"== {job.title} begins", flush=True)
    # A file, since a process that a test has left behind would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        outcome = run_job(job, output, {"OMP_NUM_THREADS": "1"})
        output.seek(0)
        with _printing:
            print(f"\n== {job.title}\n{output.read().decode(errors='replace')}", flush=True)
    return outcome


def run_job(job: Job, output: IO[bytes] | None, variables: Mapping[str, str]) -> Outcome:
    """Run its command to the end, with more environment variables."""
    started = time.monotonic()
    environment = {**os.environ, **variables}
    code = subprocess.run(job.command, cwd=ROOT, env=environment, check=False, stdout=output, stderr=output).returncode
    total, failed, skipped = _counts(job.report) if job.report else (0, 0, 0)
    return Outcome(
        name=job.name,
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


def summarise(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print the table and the closing line; returns the exit code."""
    print("\n== summary")
    for outcome in outcomes:
        mark = "ok" if outcome.code == 0 else "FAILED"
        counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        counts = "" if outcome.name == "lint" else counts
        print(f"{mark:<7}{outcome.name:<28}{counts:<40}{outcome.seconds:6.0f} s")
    passed, failed, skipped = (sum(getattr(o, name) for o in outcomes) for name in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s", flush=True)
    return int(any(outcome.code for outcome in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="only folders that begin with one of these, such as tests/unit")
    parser.add_argument("--no-lint", action="store_true", help="only the tests")
    arguments = parser.parse_args()
    files = collect()
    chosen = {f: own for f, own in files.items() if not arguments.folders or f.startswith(tuple(arguments.folders))}
    if not chosen:
        raise SystemExit(f"no folder begins with {' or '.join(arguments.folders)}: known are {', '.join(files)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        outcomes = run_jobs(jobs_of(chosen, Path(reports), with_lint=not arguments.no_lint))
    return summarise(outcomes, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
