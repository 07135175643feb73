"""What is not done here: unpickling, evaluating text, shells, reading the environment, sleeping until it happens."""

import ast
import re
from collections.abc import Iterator

import pytest

from sources import ALL, Source, dotted, num_lines, sources

UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "torch.load"}
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}

MAY_READ_ENVIRONMENT = {
    "libs/runtime/src/beamline/runtime/recipe.py",
    "services/coordinator/src/beamline/coordinator/cli.py",
    "services/coordinator/src/beamline/coordinator/data_cli.py",
    "services/coordinator/src/beamline/coordinator/launch/run.py",
    "services/coordinator/src/beamline/coordinator/launch/own_code.py",
    "services/rollout/src/beamline/rollout/environment.py",
    "services/trainer/src/beamline/trainer/environment.py",
    "services/trainer/src/beamline/trainer/megatron/distributed.py",
}
"""Configuration loading, launchers, and the two engines that are set up by environment."""


def imported(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node, node.module


def calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def is_true(call: ast.Call, keyword: str) -> bool:
    values = [k.value for k in call.keywords if k.arg == keyword]
    return any(isinstance(value, ast.Constant) and value.value is True for value in values)


def test_nothing_is_unpickled() -> None:
    assert [
        s.where(n) for s in sources(ALL) for n, module in imported(s) if module.split(".")[0] in UNSAFE_MODULES
    ] == []


def test_no_text_is_evaluated_and_no_shell_started() -> None:
    found = []
    for source in sources(ALL):
        for call, name in calls(source):
            unsafe = name in UNSAFE_CALLS and not (name == "torch.load" and is_true(call, "weights_only"))
            if unsafe or is_true(call, "shell") or is_true(call, "allow_pickle"):
                found.append(f"{source.where(call)} {name}")
    assert found == []


def test_the_environment_is_read_in_few_places() -> None:
    reads = {
        source.path
        for source in sources(("libs", "services"))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv")
    }
    assert reads - MAY_READ_ENVIRONMENT == set()


def test_nobody_sleeps_until_something_happens() -> None:
    assert [s.where(call) for s in sources() for call, name in calls(s) if name == "time.sleep"] == []


@pytest.mark.parametrize("pattern", [r"\bTODO\b", r"\bFIXME\b", r"\bXXX\b", r"/work/", r"/root/"])
def test_nothing_is_left_for_later_or_of_one_machine(pattern: str) -> None:
    here = "tests/style/test_habits.py"
    assert [s.path for s in sources(ALL) if s.path != here and re.search(pattern, s.text)] == []


def test_no_branch_is_left_out() -> None:
    assert [source.path for source in sources() if "NotImplementedError" in source.text] == []


def test_files_are_named_after_what_they_hold() -> None:
    assert [source.path for source in sources(ALL) if source.path.rpartition("/")[2] in VAGUE_NAMES] == []


def test_the_namespace_has_no_init() -> None:
    assert [source.path for source in sources() if source.path.endswith("src/beamline/__init__.py")] == []


def test_messages_are_made_and_not_filled_in() -> None:
    """No attribute of a message is assigned: structs of the protocol are frozen."""
    thawed = [
        source.where(node)
        for source in sources()
        if source.path.startswith("libs/protocol")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        and any(dotted(base) == "msgspec.Struct" for base in node.bases)
        and not any(k.arg == "frozen" and isinstance(k.value, ast.Constant) and k.value.value for k in node.keywords)
        and not node.name.startswith("_")
    ]
    assert thawed == []


def missing_docstrings(source: Source) -> Iterator[str]:
    """The module, and its public classes with behaviour and functions of more than a few lines."""
    if source.tree.body and ast.get_docstring(source.tree) is None:
        yield f"{source.path} (module)"
    for node in source.tree.body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
        if not public or ast.get_docstring(node) is not None:
            continue
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            told_by_name = all(method.name.startswith("__") for method in methods)
        else:
            told_by_name = num_lines(node) <= 6 or node.name == "main"
        if not told_by_name:
            yield f"{source.where(node)} {node.name}"


def test_public_things_state_their_contract() -> None:
    assert [missing for source in sources() for missing in missing_docstrings(source)] == []
