"""Whether a run's optimizer state, checkpoints and exports have a place: looked at before anything starts.

What is counted: two generations of the state on disk (24 bytes a parameter), one checkpoint (the policy and 12 bytes a
parameter; a hard link saves the copying, but the next update needs a file of its own), and one export. With LoRA the
parameters of state and checkpoint are those of the adapters; an export has the adapters and the whole model.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from beamline.coordinator.launch.adapters import ASSET, WEIGHT_BYTES, adapters_for, num_adapter_parameters
from beamline.coordinator.launch.mounts import MOUNTINFO, Mount, mount_of
from beamline.models import tiny
from beamline.models.weight_files import num_elements
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.checkpoints import root_of
from beamline.runtime.run_files import run_dir

STATE_BYTES = 12
"""Of a parameter: float32 main weight and both moments."""
GENERATIONS = 2
_BLOCK_BYTES = 512
"""Of `st_blocks`, whatever the filesystem's are."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that the run fills."""

    setting: str
    folder: Path
    what: str
    num_bytes: int
    freed_bytes: int = 0
    """Of what is there and is replaced."""

    @property
    def named(self) -> str:
        return f"{self.setting}={self.folder}"


def check_room(config: RunConfig, mountinfo: Path = MOUNTINFO) -> list[str]:
    """Look at every place, those of one filesystem together.

    Returns:
        What the user should know though the run can start.

    Raises:
        ConfigError: a place is not a folder, cannot be written, is too small, or is shared over a network where a disk
            of this host is needed.
    """
    remarks: list[str] = []
    needed: dict[int, int] = {}
    for place in places(config):
        there = _nearest(place)
        _check_writable(place, there)
        if place.setting == "trainer.optimizer.state_dir":
            remarks += _check_local(place, mount_of(there, mountinfo))
        device = there.stat().st_dev
        needed[device] = needed.get(device, 0) + place.num_bytes - place.freed_bytes
        _check_free(place, there, needed[device])
    return remarks


def places(config: RunConfig) -> Iterator[Place]:
    """The folders of a run's state."""
    trainer, model, count = config.trainer, num_parameters(config.model.path), num_trained(config)
    item = WEIGHT_BYTES[config.model.dtype]
    policy, optimizer = count * item, count * STATE_BYTES
    if trainer.optimizer.state == "disk":
        yield Place(
            setting="trainer.optimizer.state_dir",
            folder=Path(trainer.optimizer.state_dir),
            what=f"the optimizer's state of {count:,} parameters, twice 12 bytes for each",
            num_bytes=GENERATIONS * optimizer,
            freed_bytes=_bytes_of(Path(trainer.optimizer.state_dir) / config.run.name),
        )
    if not trainer.num_steps:
        return
    if trainer.saves:
        yield Place(
            setting="trainer.checkpoint_path",
            folder=root_of(run_dir(config), trainer.checkpoint_path),
            what=f"one checkpoint of {count:,} parameters",
            num_bytes=policy + optimizer,
        )
    yield Place(
        setting="trainer.export_path",
        folder=Path(trainer.export_path) if trainer.export_path else run_dir(config) / "exports",
        what=f"one export of {model:,} parameters",
        num_bytes=model * item + (policy if config.model.lora.is_on else 0),
    )


def num_trained(config: RunConfig) -> int:
    """Parameters that the run trains: all of the model's, or those of its adapters."""
    if config.model.lora.is_on:
        return num_adapter_parameters(adapters_for(config))
    return num_parameters(config.model.path)


def num_parameters(model_path: str) -> int:
    """Of the model that a recipe names, by its files' headers, or by its description where it is yet to be made."""
    name = model_path.removeprefix(ASSET)
    if name == model_path:
        return num_elements(Path(model_path))
    return tiny.num_parameters(tiny.SPECS[name])


def _bytes_of(folder: Path) -> int:
    """That removing it would free: a file with another hard link, as in a checkpoint, stays."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(file.st_blocks * _BLOCK_BYTES for file in files if file.st_nlink == 1)


def _nearest(place: Place) -> Path:
    """The folder itself, or the nearest above it that exists."""
    folder = place.folder.resolve()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{place.named}: {there} is not a folder: give a folder's path")
    return there


def _check_writable(place: Place, there: Path) -> None:
    """A file can be made in it; it is gone again on return."""
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{place.named} cannot be written ({there}: {error.strerror}): make it writable, or give another folder"
        ) from None


def _check_local(place: Place, mount: Mount) -> list[str]:
    if mount.is_network:
        raise ConfigError(
            f"{place.named} (OPTIMIZER_STATE_DISK_DIR) is on {mount.type}, mounted at {mount.folder}, which lies on "
            "another host: give a folder on a disk of this one"
        )
    if mount.is_memory:
        return [f"{place.named} is on {mount.type}, which is memory and no disk: the state takes room there"]
    return []


def _check_free(place: Place, there: Path, needed: int) -> None:
    filesystem = os.statvfs(there)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < needed:
        others = (
            f", and {_size(needed)} with what else the run keeps there"
            if needed > place.num_bytes - place.freed_bytes
            else ""
        )
        raise ConfigError(
            f"{place.named}: {place.what}, needs {_size(place.num_bytes)}{others}; {_size(free)} are free: make room, "
            "or give a folder on a larger disk"
        )


def _size(num_bytes: int) -> str:
    """`1,234 bytes`, from a megabyte on with the round figure too."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= scale:
            return f"{num_bytes:,} bytes ({num_bytes / scale:.1f} {unit})"
    return f"{num_bytes:,} bytes"
