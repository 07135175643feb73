"""Every dotted key of the run configuration, and what to say about one that does not exist."""

import difflib
from collections.abc import Iterator
from functools import cache

import msgspec.inspect

from beamline.protocol.config import RunConfig

type Tree = dict[str, "Tree"] | list["Tree"] | str | int | float | bool | None
"""A configuration as YAML has it."""

_LIST_ITEM = "N"
"""Stands for any index in a key, as in `data.evals.N.path`."""


@cache
def known_keys() -> frozenset[str]:
    """All keys, sections included; a list's elements are `<key>.N`, an open mapping's entries `<key>.*`."""
    return frozenset(_keys(msgspec.inspect.type_info(RunConfig), ""))


def is_known(key: str) -> bool:
    """Whether a key exists, such as `trainer.num_steps` or `data.evals.0.path`."""
    parts = [_LIST_ITEM if part.isdecimal() else part for part in key.split(".")]
    generic = ".".join(parts)
    return generic in known_keys() or ".".join([*parts[:-1], "*"]) in known_keys()


def is_open_entry(key: str) -> bool:
    """Whether a key is an entry of an open mapping, which may hold any name."""
    return f"{key.rpartition('.')[0]}.*" in known_keys()


def unknown_keys(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tree]]:
    """The keys of a configuration that do not exist, with their values."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in entries:
        key = f"{prefix}{name}"
        if is_known(key):
            yield from unknown_keys(value, f"{key}.")
        else:
            yield key, value


def nearest_keys(key: str, num_keys: int = 2) -> list[str]:
    """Valid keys that may have been meant: with the same leaf, else spelled alike, else with a like leaf."""
    leaf = key.rpartition(".")[2]
    candidates = sorted(known for known in known_keys() if not known.endswith((".*", f".{_LIST_ITEM}")))
    same_leaf = [known for known in candidates if known.rpartition(".")[2] == leaf]
    same_leaf.sort(key=lambda known: -difflib.SequenceMatcher(None, key, known).ratio())
    leaves = {known.rpartition(".")[2]: known for known in candidates}
    leaf_alike = [leaves[found] for found in difflib.get_close_matches(leaf, leaves, n=num_keys, cutoff=0.75)]
    return (
        same_leaf[:num_keys]
        or difflib.get_close_matches(key, candidates, n=1, cutoff=0.85)
        or leaf_alike
        or difflib.get_close_matches(key, candidates, n=num_keys, cutoff=0.5)
    )


def _keys(kind: msgspec.inspect.Type, prefix: str) -> Iterator[str]:
    match kind:
        case msgspec.inspect.StructType():
            for field in kind.fields:
                yield f"{prefix}{field.encode_name}"
                yield from _keys(field.type, f"{prefix}{field.encode_name}.")
        case msgspec.inspect.ListType():
            yield f"{prefix}{_LIST_ITEM}"
            yield from _keys(kind.item_type, f"{prefix}{_LIST_ITEM}.")
        case msgspec.inspect.TupleType():
            yield f"{prefix}{_LIST_ITEM}"
        case msgspec.inspect.DictType():
            yield f"{prefix}*"
        case msgspec.inspect.UnionType():
            for member in kind.types:
                yield from _keys(member, prefix)
        case _:
            pass
