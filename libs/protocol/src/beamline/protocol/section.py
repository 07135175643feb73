"""What every part of the run configuration is made of: its base, the bounds of its numbers, the check of its names."""

import difflib
import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(gt=0)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the configuration."""


_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_choice(key: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError where a setting is none of its choices; says which of them is nearest."""
    if value not in (choices := list(known)):
        raise ValueError(f"{_no_choice(key, value, choices)}? Known are {', '.join(choices)}")


def check_name(key: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError where a setting names neither what Beamline has nor `package.module:name` of the user's own."""
    if value not in (choices := list(known)) and not _IMPORT_PATH.fullmatch(value):
        raise ValueError(
            f"{_no_choice(key, value, choices)}? Known are {', '.join(choices)}, and one of your own is given as "
            "package.module:name"
        )


def _no_choice(key: str, value: str, choices: list[str]) -> str:
    nearest = difflib.get_close_matches(value, choices, n=1, cutoff=0.0)[0]
    return f"{key}={value!r} does not exist: did you mean {nearest!r}"
