"""Which names a PromQL expression reads, by its tokens: https://prometheus.io/docs/prometheus/latest/querying/basics/"""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
      | (?P<number>0x[0-9a-f]+|[0-9][0-9._]*(?:e[+-]?[0-9]+|(?:ms|[smhdwy])(?:[0-9]+(?:ms|[smhdwy]))*)?)
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){}\[\],@:])
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = _LABEL_LISTS | {"and", "or", "unless", "atan2", "bool", "offset", "inf", "nan", "start", "end"}


@dataclass
class Names:
    metrics: set[str] = field(default_factory=set[str])
    labels: set[str] = field(default_factory=set[str])


def names_in(expression: str) -> Names:
    """Metrics and labels that an expression reads. Raises ValueError at what is no PromQL token, or not closed."""
    found, tokens = Names(), _tokens(expression)
    closing: list[str] = []
    for number, (kind, text) in enumerate(tokens):
        before, after = _text(tokens, number - 1), _text(tokens, number + 1)
        if kind == "sign" and text in "({[":
            is_list = text == "(" and before.lower() in _LABEL_LISTS
            closing.append("labels" if is_list or text == "{" else text)
        elif kind == "sign" and text in ")}]":
            if not closing:
                raise ValueError(f"{expression!r} closes {text} that nothing opened")
            closing.pop()
        elif kind == "name" and closing and closing[-1] == "labels":
            found.labels.add(text)
        elif kind == "name" and closing[-1:] != ["["] and text.lower() not in _WORDS and not _is_called(after):
            found.metrics.add(text)
    if closing:
        raise ValueError(f"{expression!r} leaves {len(closing)} brackets open")
    return found


def _is_called(after: str) -> bool:
    """Whether a name is a function's, or an aggregation's that says its labels first: `sum by (x) (y)`."""
    return after == "(" or after.lower() in ("by", "without")


def _text(tokens: list[tuple[str, str]], number: int) -> str:
    return tokens[number][1] if 0 <= number < len(tokens) else ""


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, position = list[tuple[str, str]](), 0
    while position < len(expression):
        found = _TOKEN.match(expression, position)
        if found is None:
            raise ValueError(f"{expression!r} has no PromQL at {position}: {expression[position:]!r}")
        position = found.end()
        if found.lastgroup != "space":
            tokens.append((found.lastgroup or "", found.group()))
    return tokens
