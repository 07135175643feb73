"""Main loops erode line by line; these limits are what holds them."""

from sources import ALL, ROOT, num_lines, sources

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 40
LOOPS = {"run", "run_step", "train_step", "step", "serve", "handle", "main"}
"""Read as verbs, top to bottom."""

FOUR_FILES = (
    "libs/protocol/src/beamline/protocol/ring.py",
    "services/coordinator/src/beamline/coordinator/coordinator.py",
    "services/rollout/src/beamline/rollout/worker.py",
    "services/trainer/src/beamline/trainer/train_step.py",
)
MAX_FOUR_FILES_LINES = 700


def test_a_file_is_one_idea() -> None:
    lengths = {source.path: len(source.text.splitlines()) for source in sources(ALL)}
    assert {path: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_a_function_is_about_one_screen() -> None:
    long = {s.where(f): num_lines(f) for s in sources() for f in s.functions() if num_lines(f) > MAX_FUNCTION_LINES}
    assert long == {}


def test_a_loop_reads_as_verbs() -> None:
    loops = {
        f"{source.where(function)} {function.name}": num_lines(function)
        for source in sources()
        for function in source.functions()
        if function.name in LOOPS
    }
    assert {where: n for where, n in loops.items() if n > MAX_LOOP_LINES} == {}


def test_four_files_tell_what_a_step_does() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in FOUR_FILES}
    assert sum(lengths.values()) < MAX_FOUR_FILES_LINES, lengths


def test_the_readme_names_the_four_files() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [path for path in FOUR_FILES if path not in readme] == []
