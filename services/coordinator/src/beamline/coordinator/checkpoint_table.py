"""A run's checkpoints on the terminal, one a row, and as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from beamline.runtime.checkpoints import CheckpointFacts

_SHORT = {"tensor": "TP", "pipeline": "PP", "expert": "EP", "data": "DP"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """`beamline checkpoints --json`."""

    root: str
    checkpoints: list[CheckpointFacts]


def as_json(root: Path, found: Sequence[CheckpointFacts]) -> str:
    """One object."""
    return msgspec.json.encode(Listing(root=str(root), checkpoints=list(found))).decode()


def show_checkpoints(root: Path, found: Sequence[CheckpointFacts], now: float, console: Console) -> None:
    """One row a checkpoint, newest first."""
    if not found:
        console.print(f"no checkpoint in {root} yet")
        return
    table = Table("step", "", "holds", "size", "age", "layout", "optimizer", "complete", "verified", box=None)
    for facts in found:
        table.add_row(
            str(facts.step),
            "latest" if facts.is_latest else "",
            _holds_text(facts),
            size_text(facts.num_bytes),
            age_text(now - facts.created),
            layout_text(facts.layout),
            facts.optimizer_state or "–",
            f"no ({facts.wrong})" if facts.wrong else "yes",
            _verified_text(facts, now),
        )
    console.print(table)
    console.print(f"in {root}")


def size_text(num_bytes: float) -> str:
    """Such as "12.3 MiB"."""
    power = 0
    while num_bytes >= 1024 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.1f} {_UNITS[power]}" if power else f"{num_bytes:.0f} {_UNITS[0]}"


def age_text(seconds: float) -> str:
    """Such as "12 s", "3 min", "5 h", "2 d"."""
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) // unit:.0f} {name}"
    return f"{seconds // 86400:.0f} d"


def layout_text(layout: Mapping[str, int]) -> str:
    """Such as "TP2 EP2"; "1 rank" where nothing is shared out, a dash where it is not known."""
    if not layout:
        return "–"
    return " ".join(f"{short}{layout[name]}" for name, short in _SHORT.items() if layout.get(name, 1) > 1) or "1 rank"


def _holds_text(facts: CheckpointFacts) -> str:
    """Such as "policy", or "adapter of rank 16 on models/beam"."""
    return f"{facts.holds} of rank {facts.lora_rank} on {facts.base}" if facts.lora_rank else facts.holds


def _verified_text(facts: CheckpointFacts, now: float) -> str:
    if facts.verified is None:
        return "no"
    ago = f"{age_text(now - facts.verified)} ago"
    return f"{ago}: {facts.found_damage}" if facts.found_damage else ago
