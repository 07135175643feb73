"""Where state, checkpoints and exports go is looked at before anything starts: is there room, and is it a disk here."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator.launch.disk_room import check_room, num_parameters, places
from beamline.coordinator.launch.mounts import MOUNTINFO, mount_of
from beamline.coordinator.launch.run import run
from beamline.models import assets
from beamline.protocol.config import OptimizerSection, RunConfig
from beamline.protocol.errors import ConfigError
from launcher_fakes import LineDisplay, fake_command


def on_disk(config: RunConfig, folder: Path | str) -> RunConfig:
    optimizer = OptimizerSection(state="disk", state_dir=str(folder))
    return replace(config, trainer=replace(config.trainer, optimizer=optimizer))


def with_trainer(config: RunConfig, **settings: str | int) -> RunConfig:
    return replace(config, trainer=replace(config.trainer, **settings))


def refusal(config: RunConfig, mountinfo: Path = MOUNTINFO) -> str:
    with pytest.raises(ConfigError) as error:
        check_room(config, mountinfo)
    return str(error.value)


def mounted(tmp_path: Path, folder: Path, kind: str) -> Path:
    """The kernel's list with one filesystem more."""
    table = tmp_path / "mountinfo"
    escaped = str(folder).replace(" ", "\\040")
    table.write_text(f"{MOUNTINFO.read_text()}99 1 0:99 / {escaped} rw,relatime shared:7 - {kind} server:/data rw\n")
    return table


def test_a_disk_with_room_is_said_nothing_about_and_left_as_it_was(config: RunConfig, tmp_path: Path) -> None:
    ext4 = mounted(tmp_path, tmp_path, "ext4")
    before = sorted(tmp_path.rglob("*"))
    assert check_room(on_disk(config, tmp_path / "not" / "yet"), ext4) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "lustre", "beegfs", "afs"])
def test_state_on_another_host_is_refused_by_name(config: RunConfig, tmp_path: Path, kind: str) -> None:
    there = tmp_path / "a share"
    there.mkdir()
    text = refusal(on_disk(config, there / "state"), mounted(tmp_path, there, kind))
    assert text.startswith(f"trainer.optimizer.state_dir={there / 'state'} (OPTIMIZER_STATE_DISK_DIR) is on ")
    assert f"is on {kind.removeprefix('fuse.')}, mounted at {there}" in text
    assert "give a folder on a disk of this one" in text


def test_checkpoints_may_lie_on_another_host(config: RunConfig, tmp_path: Path) -> None:
    assert check_room(with_trainer(config, checkpoint_path=str(tmp_path)), mounted(tmp_path, tmp_path, "nfs")) == []


def test_memory_is_called_memory(config: RunConfig, tmp_path: Path) -> None:
    (remark,) = check_room(on_disk(config, tmp_path), mounted(tmp_path, tmp_path, "tmpfs"))
    assert remark.startswith(f"trainer.optimizer.state_dir={tmp_path} is on tmpfs, which is memory and no disk")


def test_the_kernels_own_list_is_read(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self")).type == "proc"
    assert mount_of(tmp_path.resolve()).folder.is_mount()


@pytest.mark.parametrize("setting", ["checkpoint_path", "export_path"])
def test_a_place_that_cannot_be_written(config: RunConfig, setting: str) -> None:
    text = refusal(with_trainer(config, **{setting: "/proc/run"}))
    assert text.startswith(f"trainer.{setting}=/proc/run cannot be written (/proc: ")
    assert "make it writable, or give another folder" in text
    assert "trainer.optimizer.state_dir=/proc/run cannot be written" in refusal(on_disk(config, "/proc/run"))


def test_a_file_is_no_folder(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file is not a folder: give a folder's path" in refusal(on_disk(config, tmp_path / "file" / "state"))


def giant(config: RunConfig, folder: Path, num_values: int) -> RunConfig:
    """A model whose files say that they hold so many values; a hole stands for them."""
    assets.materialise("bench", folder)
    header = f'{{"weight":{{"dtype":"BF16","shape":[{num_values}],"data_offsets":[0,{2 * num_values}]}}}}'.encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        os.truncate(file.fileno(), 8 + len(header) + 2 * num_values)
    return replace(config, model=replace(config.model, path=str(folder)))


async def test_a_full_disk_is_said_before_the_run_starts_with_the_bytes(config: RunConfig, tmp_path: Path) -> None:
    filesystem = os.statvfs(tmp_path)
    free = filesystem.f_bavail * filesystem.f_frsize
    count = free // 20  # the state does not fit, though the rest would
    large = giant(config, tmp_path / "giant", count)
    assert num_parameters(large.model.path) == count
    with pytest.raises(ConfigError) as error:
        await run(on_disk(large, tmp_path / "state"), LineDisplay(), command=fake_command())
    text = str(error.value)
    assert text.startswith(f"trainer.optimizer.state_dir={tmp_path / 'state'}: the optimizer's state of {count:,} ")
    assert f"needs {24 * count:,} bytes" in text and "are free: make room, or give a folder on a larger disk" in text
    assert not (tmp_path / "state").exists() and not Path(config.run.dir).exists()


def test_state_that_is_replaced_makes_room(config: RunConfig, tmp_path: Path) -> None:
    """Unless a checkpoint has the file too."""
    state = tmp_path / "state" / "trial" / "rank-00000" / "generation-0.state"
    state.parent.mkdir(parents=True)
    state.write_bytes(bytes(1 << 20))
    (place, *_) = places(on_disk(config, tmp_path / "state"))
    assert place.freed_bytes >= 1 << 20
    os.link(state, tmp_path / "linked.state")
    (place, *_) = places(on_disk(config, tmp_path / "state"))
    assert place.freed_bytes == 0


def test_what_one_disk_has_to_hold_is_added_up(config: RunConfig, tmp_path: Path) -> None:
    filesystem = os.statvfs(tmp_path)
    count = filesystem.f_bavail * filesystem.f_frsize // 30
    large = giant(config, tmp_path / "giant", count)
    text = refusal(on_disk(large, tmp_path / "state"))
    assert text.startswith("trainer.checkpoint_path="), "24 bytes a parameter for the state fit, 16 more do not"
    assert f"needs {16 * count:,} bytes" in text and f"and {40 * count:,} bytes" in text
    check_room(with_trainer(large, checkpoint_interval=0))
