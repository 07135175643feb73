"""Reading and writing the doctor's files; `beamline.protocol.doctor` says what they hold."""

from pathlib import Path

import msgspec

from beamline.protocol.doctor import INDEX, KeptSamples, Recomputed
from beamline.protocol.errors import BlobError


def write_index(folder: Path, samples: KeptSamples) -> None:
    """Written last: a folder with an index is whole."""
    draft = folder / f".{INDEX}"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(samples), indent=2) + b"\n")
    draft.replace(folder / INDEX)


def read_index(folder: Path) -> KeptSamples:
    """Raises BlobError for an index that is missing or damaged."""
    path = folder / INDEX
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptSamples)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BlobError(f"{path} is no index of kept samples ({error}): delete {folder} and sample anew") from error


def read_kept(folder: Path, name: str) -> bytes:
    """A file that the index names. Raises BlobError where it is gone."""
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise BlobError(f"{folder / name} cannot be read ({error}): delete {folder} and sample anew") from error


def write_recomputed(path: Path, recomputed: Recomputed) -> None:
    """As MessagePack, for the columns' sake."""
    path.write_bytes(msgspec.msgpack.encode(recomputed))


def read_recomputed(path: Path) -> Recomputed:
    """Columns are views into what was read. Raises BlobError for a file that is something else."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Recomputed)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BlobError(f"{path} does not hold the trainer's readings: {error}") from error
