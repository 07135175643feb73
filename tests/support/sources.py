"""The project's own source files, as text and as syntax trees."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRODUCT = ("libs", "services", "benchmarks")
ALL = (*PRODUCT, "tools", "tests")

type Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the checkout."""

    path: str
    text: str
    tree: ast.Module

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def where(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path}:{node.lineno}"


@functools.cache
def sources(folders: tuple[str, ...] = PRODUCT) -> tuple[Source, ...]:
    """Every Python file in these folders, environments left out."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = []
    for path in paths:
        relative = path.relative_to(ROOT)
        if ".venv" not in relative.parts:
            text = path.read_text(encoding="utf-8")
            found.append(Source(str(relative), text, ast.parse(text)))
    return tuple(found)


def num_lines(function: Function) -> int:
    """Lines of a function without its docstring and decorators."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def dotted(node: ast.expr) -> str:
    """`os.environ.get` of such an expression; empty for any other."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute() if base := dotted(node.value):
            return f"{base}.{node.attr}"
        case _:
            return ""
