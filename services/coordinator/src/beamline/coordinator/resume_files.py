"""The coordinator's part of a checkpoint: where the data cursor stands, and what the ledger holds.

Two files of JSON, decoded strictly: a tag names the format and its version.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import PromptGroup

CURSOR_FILE = "data_cursor.json"
LEDGER_FILE = "ledger.json"

type Count = Annotated[int, Meta(ge=0)]


class DataIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows a position counts, and in which order."""

    source: str
    """Where they were read, for messages: the same rows may lie elsewhere."""
    num_rows: Count
    rows_hash: str
    """blake2b-128 over all rows, 32 hex digits."""
    seed: int | None
    """Of the shuffle; None is the file's order."""


class DataCursorFile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="beamline-data-cursor/1",
):
    position: Count
    """Rows drawn since the run's start, the dropped ones included."""
    rows: DataIdentity


class Ends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups by how they ended."""

    trained: Count
    filtered: Count
    stale: Count
    failed: Count


class LedgerFile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format", tag="beamline-ledger/1"
):
    """What a coordinator has to know to go on after `step`. The next group is number `sum of the ends + open`."""

    step: Annotated[int, Meta(ge=1)]
    started: float
    """Unix time in seconds of the run's first start."""
    ends: Ends
    open: Sequence[PromptGroup]
    """Groups in flight, as they were issued, oldest first."""
    evaluated: Sequence[Count]
    """Policy versions whose evaluation is complete."""

    def __post_init__(self) -> None:
        if len({prompt.group_id for prompt in self.open}) < len(self.open):
            raise ValueError("a group is open twice")


class CoordinatorState(msgspec.Struct, frozen=True, kw_only=True):
    """Both files, and the checkpoint's folder that they were read from."""

    folder: Path
    cursor: DataCursorFile
    ledger: LedgerFile


def encode_files(cursor: DataCursorFile, ledger: LedgerFile) -> dict[str, bytes]:
    """By file name."""
    files = {CURSOR_FILE: cursor, LEDGER_FILE: ledger}
    return {
        name: msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n" for name, content in files.items()
    }


def read_files(folder: Path) -> CoordinatorState:
    """Both files of a checkpoint.

    Raises:
        ConfigError: one that is missing, damaged, of another version, or that does not fit the other, by its name.
    """
    cursor, ledger = _read(folder / CURSOR_FILE, DataCursorFile), _read(folder / LEDGER_FILE, LedgerFile)
    ends = ledger.ends
    num_issued = ends.trained + ends.filtered + ends.stale + ends.failed + len(ledger.open)
    if cursor.position < num_issued:
        raise ConfigError(
            f"{folder}: {LEDGER_FILE} has {num_issued} groups, {CURSOR_FILE} only {cursor.position} rows: one of them "
            "is another checkpoint's; resume from another one (`beamline checkpoints` lists them)"
        )
    return CoordinatorState(folder=folder, cursor=cursor, ledger=ledger)


def _read[T](path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): resume from another checkpoint (`beamline checkpoints` lists them)"
        ) from error
