"""The run that more than one file looks at."""

import pytest

from real_runs import DEMO_STEPS, Run, processes_of, run_to_end, shared_memory_of


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo's recipe with the real engines, at its end."""
    settings = (f"trainer.num_steps={DEMO_STEPS}", f"trainer.eval_interval={DEMO_STEPS}")
    run = run_to_end("tiny-beam", tmp_path_factory.mktemp("demo"), *settings)
    assert run.code == 0, run.output
    assert processes_of(run.path) == [], "something is left running"
    assert shared_memory_of(run.path) == [], "something is left in shared memory"
    return run
