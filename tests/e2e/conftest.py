"""The run that more than one file looks at."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from heard_run import heard
from real_runs import DEMO_STEPS, Run, processes_of, run_to_end, shared_memory_of
from watched_run import watched

LOOK_AT_THE_DEMO = ("test_dashboard", "test_demo", "test_evaluate", "test_logs", "test_timeline", "test_traces")
"""Files that must meet in one process, for the run is made once in each."""


class ByRun(LoadScopeScheduling):
    """Where processes share the tests out, files stay whole, and those that look at the demo stay together."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0]).stem
        return "demo" if file in LOOK_AT_THE_DEMO else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByRun:
    return ByRun(config, log)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if "demo" in item.fixturenames and item.path.stem not in LOOK_AT_THE_DEMO:
            raise pytest.UsageError(f"{item.path.name} looks at the demo: add it to LOOK_AT_THE_DEMO in conftest.py")


@pytest.fixture(scope="session", autouse=True)
def own_cores(request: pytest.FixtureRequest) -> None:
    """The runs of each such process have cores of their own: two runs' threads on the same ones wait for each other."""
    if process := getattr(request.config, "workerinput", None):
        cores, number = sorted(os.sched_getaffinity(0)), int(process["workerid"].removeprefix("gw"))
        os.sched_setaffinity(0, cores[number :: process["workercount"]] or cores)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's recipe with the real engines, at its end; its metrics were heard, and its dashboard was open."""
    settings = (f"trainer.num_steps={DEMO_STEPS}", f"trainer.eval_interval={DEMO_STEPS}")
    folder = tmp_path_factory.mktemp("demo")
    with heard(folder / "run") as hearing, watched(folder / "run") as watching:
        run = run_to_end("tiny-beam", folder, *settings)
    assert run.code == 0, run.output
    assert processes_of(run.path) == [], "something is left running"
    assert shared_memory_of(run.path) == [], "something is left in shared memory"
    return replace(run, heard=hearing.result(), watched=watching.result())
