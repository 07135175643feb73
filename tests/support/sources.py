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


def sources(folders: tuple[str, ...] = PRODUCT) -> tuple[Source, ...]:
    """Every Python file in these folders, environments left out."""
    return tuple(source for folder in folders for source in _sources_in(folder))


@functools.cache
def _sources_in(folder: str) -> tuple[Source, ...]:
    found = [_read(path) for path in files_in(ROOT / folder) if path.suffix == ".py"]
    return tuple(sorted(found, key=lambda source: source.path))


def files_in(folder: Path) -> Iterator[Path]:
    """All files below a folder but those of environments, which hold a hundred times as many and are not entered."""
    for parent, folders, files in folder.walk():
        folders[:] = [name for name in folders if name != ".venv"]
        yield from (parent / name for name in files)


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(str(path.relative_to(ROOT)), text, ast.parse(text))


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
