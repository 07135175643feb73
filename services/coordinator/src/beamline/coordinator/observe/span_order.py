"""Spans in the order in which they began. Files have them in the order in which they ended."""

import heapq
from collections.abc import Iterable, Iterator
from itertools import batched
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from beamline.coordinator.observe.spans import Span

HELD = 20_000
"""Spans in memory at once; more are sorted in parts, which lie in temporary files until they are merged."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Span)


def in_order(spans: Iterable[Span], held: int = HELD) -> Iterator[Span]:
    """The spans by start; of those that begin together, the longest first, which may hold the others."""
    with TemporaryDirectory() as folder:
        parts: list[Path] = []
        last: list[Span] = []
        for batch in batched(spans, held):
            if last:
                parts.append(_spill(last, Path(folder) / f"{len(parts)}.jsonl"))
            last = sorted(batch, key=_key)
        yield from heapq.merge(*(_read(part) for part in parts), last, key=_key)


def _key(span: Span) -> tuple[int, int]:
    return span.start_ns, -span.end_ns


def _spill(spans: list[Span], path: Path) -> Path:
    with path.open("wb") as file:
        file.writelines(_encoder.encode(span) + b"\n" for span in spans)
    return path


def _read(path: Path) -> Iterator[Span]:
    with path.open("rb") as file:
        yield from map(_decoder.decode, file)
