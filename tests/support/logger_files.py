"""Reads what loggers have written, by the formats' own definitions."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record

_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
"""Of a record in wandb's log, which is LevelDB's: checksum, length, kind (1 whole, 2 first, 3 middle, 4 last)."""
_FILE_HEADER_BYTES = 7


def scalars(folder: Path) -> list[tuple[float, int, dict[str, float]]]:
    """Time, step and values of TensorBoard's events, in order."""
    (path,) = folder.iterdir()
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    return [
        (event.wall_time, event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in events
        if event.HasField("summary")
    ]


def wandb_history(content: bytes) -> list[dict[str, Any]]:
    """The rows that a run of wandb has logged."""
    rows = []
    for payload in _records(content):
        record = Record.FromString(payload)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def wandb_project(content: bytes) -> str:
    """Where a run of wandb belongs."""
    return next(run.project for run in (Record.FromString(one).run for one in _records(content)) if run.run_id)


def _records(content: bytes) -> Iterator[bytes]:
    position, parts = _FILE_HEADER_BYTES, b""
    while position + _HEADER.size <= len(content):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER.size:
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        parts += content[position : position + length]
        position += length
        if kind in (1, 4):
            yield parts
            parts = b""
