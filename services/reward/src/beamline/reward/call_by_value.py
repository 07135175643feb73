"""Two programs that only exchange plain values: one holds a completion's functions, the other asserts what they return.

The asserts run where the completion's code never was, so nothing that it does can make them true: no early exit, no
changed checker, no object that equals everything. Both run in the sandbox, by path and without packages:

    python call_by_value.py serve COMPLETION.py          calls on standard input, answers on standard output
    python call_by_value.py check TESTS.py CALLS ANSWERS NAME...      the other ends, as descriptors

Each line is a Python literal: (name, positional arguments, named arguments), answered by ("value", value) or
("error", type, text). The exit status of `check` is one of those below; it prints why.
"""

import ast
import builtins
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import islice
from typing import TextIO

PASSED, FAILED, BAD_TESTS = 0, 1, 3
MAX_ITEMS = 100_000
"""Taken of an iterator, which is answered as a list."""


class NotPlain(TypeError):
    """A value that has no literal."""


def plain(value: object) -> object:
    """The value of built-in types alone. Raises NotPlain."""
    match value:
        case None | bool() | bytes():
            return value
        case int():
            return int(value)
        case float() if value == value:
            return float(value)
        case complex():
            return complex(value)
        case str():
            return str(value)
        case tuple():
            return tuple(map(plain, value))
        case list():
            return list(map(plain, value))
        case Set():
            return set(map(plain, value))
        case Mapping():
            return {plain(key): plain(item) for key, item in value.items()}
        case Iterator() | range():
            return list(map(plain, islice(value, MAX_ITEMS)))
        case _:
            raise NotPlain(f"{type(value).__name__} is not a plain value")


def spell(value: object) -> str:
    """A literal for a plain value; the infinities are numbers that are too large."""
    match value:
        case float():
            return repr(value).replace("inf", "1e999")
        case tuple():
            return "(" + "".join(f"{spell(item)}," for item in value) + ")"
        case list():
            return "[" + ",".join(map(spell, value)) + "]"
        case set() if value:
            return "{" + ",".join(map(spell, value)) + "}"
        case dict():
            return "{" + ",".join(f"{spell(key)}:{spell(item)}" for key, item in value.items()) + "}"
        case _:
            return repr(value)


def serve(path: str) -> int:
    """Run the completion, then answer calls of its functions until there are no more."""
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    namespace = runpy.run_path(path, run_name="completion")
    for call in calls:
        name, positional, named = ast.literal_eval(call)
        try:
            answer = ("value", plain(namespace[name](*positional, **named)))
        except KeyError as error:
            kind = "KeyError" if name in namespace else "NameError"
            answer = ("error", kind, f"{error}")
        except Exception as error:
            answer = ("error", type(error).__name__, f"{error}")
        print(spell(answer), file=answers)
    return PASSED


def check(path: str, calls: TextIO, answers: TextIO, names: list[str]) -> int:
    """Run the tests, in which these names are the completion's functions."""
    try:
        runpy.run_path(path, init_globals={name: _function(name, calls, answers) for name in names})
    except NotPlain as error:
        print(f"the tests call with what is no plain value: {error}")
        return BAD_TESTS
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        print(f"line {lines[-1] if lines else 0}: {type(error).__name__} {error}")
        return FAILED
    return PASSED


def _function(name: str, calls: TextIO, answers: TextIO) -> Callable[..., object]:
    def call(*positional: object, **named: object) -> object:
        calls.write(spell(plain((name, positional, named))) + "\n")
        calls.flush()
        if not (line := answers.readline()):
            raise RuntimeError("the completion has ended")
        match ast.literal_eval(line):
            case ("value", value):
                return value
            case ("error", str(kind), text):
                raised = getattr(builtins, kind, None)
                # Looked at before it is called: the name is the completion's word.
                if isinstance(raised, type) and issubclass(raised, Exception):
                    raise raised(text)
                raise RuntimeError(f"{kind}: {text}")
            case _:
                raise RuntimeError("the completion answered what is no answer")

    return call


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve(sys.argv[2]))
    _, _, tests, to, back, *functions = sys.argv
    sys.exit(check(tests, os.fdopen(int(to), "w"), os.fdopen(int(back)), functions))
