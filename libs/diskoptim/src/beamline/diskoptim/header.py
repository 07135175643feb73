"""`<stem>.json`: what is in `<stem>.state`. Torch-free, and the same for state kept on disk, host or device.

    {"format": "adamw-state", "version": 1, "dtype": "float32", "byte_order": "little",
     "generation": 7, "num_steps": 7, "num_bytes": 98304,
     "buckets": [{"offset": 0, "num_bytes": 98304, "xxh3_64": "0123456789abcdef"}, ...],
     "parameters": {"layers.0.weight": {"shape": [64, 32], "pieces": [[bucket, position, length], ...]}, ...},
     "xxh3_64": "fedcba9876543210"}

The last sum is over the rest of the header, encoded as `encode` does. It is written after the state is on the disk and
takes the place of an older header at once: where there is a header, there is a complete state.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from beamline.diskoptim.errors import StateError
from beamline.diskoptim.files import replace_durably
from beamline.diskoptim.layout import Bucket, Piece, Placement

FORMAT = "adamw-state"
VERSION = 1
MEND = "restore it from a checkpoint, or empty the folder to start anew"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a header says: buckets in order, parameters by name in the order in which they lie."""

    generation: int
    num_steps: int
    buckets: tuple[Bucket, ...]
    parameters: dict[str, Placement]

    @property
    def num_bytes(self) -> int:
        """Length of the state file."""
        return self.buckets[-1].offset + self.buckets[-1].num_bytes if self.buckets else 0

    @property
    def section_length(self) -> int:
        """Elements of a section of the largest bucket."""
        return max((bucket.section_length for bucket in self.buckets), default=0)

    def encode(self) -> bytes:
        """The file's bytes."""
        facts: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": "float32",
            "byte_order": "little",
            "generation": self.generation,
            "num_steps": self.num_steps,
            "num_bytes": self.num_bytes,
            "buckets": [{"offset": b.offset, "num_bytes": b.num_bytes, "xxh3_64": b.xxh3_64} for b in self.buckets],
            "parameters": {
                name: {"shape": place.shape, "pieces": [[p.bucket, p.position, p.length] for p in place.pieces]}
                for name, place in self.parameters.items()
            },
        }
        return _canonical(facts | {"xxh3_64": _sum(facts)})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises StateError for a file that is missing, damaged, foreign or of a later version."""
        try:
            facts = json.loads(path.read_bytes())
            found, tag, version = facts.pop("xxh3_64"), facts["format"], facts["version"]
        except FileNotFoundError as error:
            raise StateError(f"{path} is missing: there is no complete state of that name; {MEND}") from error
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise StateError(f"{path} is no header of an optimizer's state ({error!r}); {MEND}") from error
        if (tag, version) != (FORMAT, VERSION):
            raise StateError(f"{path} is {tag!r} version {version!r}, and {FORMAT!r} version {VERSION} is read here")
        if found != (expected := _sum(facts)):
            raise StateError(f"{path} is damaged: its sum is {expected}, and it says {found}; {MEND}")
        return cls(
            generation=facts["generation"],
            num_steps=facts["num_steps"],
            buckets=tuple(Bucket(b["offset"], b["num_bytes"], b["xxh3_64"]) for b in facts["buckets"]),
            parameters={
                name: Placement(tuple(place["shape"]), tuple(Piece(*piece) for piece in place["pieces"]))
                for name, place in facts["parameters"].items()
            },
        )

    def write(self, folder: Path, stem: str) -> Path:
        """In the place of an older one, at once and durably."""
        path = header_path(folder, stem)
        replace_durably(path, self.encode())
        return path


def state_path(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.state"


def header_path(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.json"


def check_length(header: Header, path: Path) -> None:
    """Raises StateError where the state file is missing or not as long as its header says."""
    try:
        found = os.stat(path).st_size
    except FileNotFoundError as error:
        raise StateError(f"{path} is missing, and its header is there; {MEND}") from error
    if found != header.num_bytes:
        raise StateError(f"{path} has {found} bytes, and its header says {header.num_bytes}: truncated; {MEND}")


def _canonical(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _sum(facts: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_canonical(facts))
