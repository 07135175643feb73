"""The run that more than one file looks at."""

from dataclasses import replace

import pytest

from heard_run import heard
from real_runs import DEMO_STEPS, Run, processes_of, run_to_end, shared_memory_of
from watched_run import watched


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
