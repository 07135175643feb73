"""What a verification of a checkpoint has found, kept beside it until its manifest changes."""

import time
from pathlib import Path

import msgspec
import xxhash

from beamline.runtime.checkpoint_manifest import MANIFEST, VERIFIED, VERIFIED_DRAFT


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The last one."""

    manifest_xxh3_128: str
    time: float
    """Unix time."""
    damage: str
    """Empty where all was well."""

    @classmethod
    def of(cls, folder: Path) -> "Verification | None":
        """None where there was none, or none of the present manifest."""
        try:
            found = msgspec.json.decode((folder / VERIFIED).read_bytes(), type=cls)
            return found if found.manifest_xxh3_128 == _manifest_hash(folder) else None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    @classmethod
    def remember(cls, folder: Path, damage: str) -> None:
        """Raises OSError where the folder has no manifest or cannot be written to."""
        found = cls(manifest_xxh3_128=_manifest_hash(folder), time=time.time(), damage=damage)
        draft = folder / VERIFIED_DRAFT
        draft.write_bytes(msgspec.json.encode(found) + b"\n")
        draft.replace(folder / VERIFIED)


def _manifest_hash(folder: Path) -> str:
    return xxhash.xxh3_128_hexdigest((folder / MANIFEST).read_bytes())
