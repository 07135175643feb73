"""The ground truths of the grader `code`: JSON, with either asserts or pairs of input and output.

{"asserts": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]}
{"pairs": [{"stdin": "2 3\\n", "stdout": "5\\n"}]}
"""

import ast
import builtins
from collections.abc import Iterator

import msgspec


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program reads, and what it has to print."""

    stdin: str
    stdout: str


class CodeTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tests of one problem.

    Raises:
        ValueError: both kinds or none, or asserts that are no Python.
    """

    asserts: list[str] = msgspec.field(default_factory=list[str])
    """Python, run as one text; names that it does not define are the completion's functions."""
    pairs: list[Pair] = msgspec.field(default_factory=list[Pair])
    """Each is one run of the completion."""

    def __post_init__(self) -> None:
        if bool(self.asserts) == bool(self.pairs):
            raise ValueError("give either asserts or pairs")
        try:
            ast.parse(self.program)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"asserts are no Python: {error}") from None

    @property
    def program(self) -> str:
        """The asserts as one text."""
        return "\n".join(self.asserts)

    @property
    def functions(self) -> list[str]:
        """Names that the asserts use and do not define."""
        nodes = list(ast.walk(ast.parse(self.program)))
        used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        return sorted(used - {name for node in nodes for name in _defined(node)} - set(dir(builtins)))


def read_tests(ground_truth: str) -> CodeTests:
    """Raises ValueError where the ground truth is not what the grader `code` needs."""
    try:
        return msgspec.json.decode(ground_truth, type=CodeTests)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"ground truth {ground_truth[:40]!r} has no tests: {error}; code needs JSON such as "
            '{"asserts": ["assert f(1) == 2"]} or {"pairs": [{"stdin": "1", "stdout": "2"}]}'
        ) from None


def same_output(printed: str, expected: str) -> bool:
    """Whether all lines are the same, but for white space at their ends and empty lines at the end."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((alias.asname or alias.name.partition(".")[0]) for alias in aliases)
        case _:
            pass
