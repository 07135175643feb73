"""Where a run keeps its optimizer's state, as its configuration says."""

from functools import partial
from pathlib import Path

from beamline.protocol.config import RunConfig
from beamline.trainer.megatron.states.adam_states import MakeStates
from beamline.trainer.megatron.states.device import DeviceStates
from beamline.trainer.megatron.states.disk import DiskStates, discard
from beamline.trainer.megatron.states.errors import state_errors
from beamline.trainer.megatron.states.host import HostStates


def states_of(config: RunConfig, rank: int) -> MakeStates:
    """For one rank. On a disk each has a folder of its own: `<state_dir>/<run name>/rank-N`."""
    optimizer = config.trainer.optimizer
    if optimizer.state == "disk":
        run = Path(optimizer.state_dir) / config.run.name
        if rank == 0:
            _remove_from(run, config.trainer.parallel.world_size)
        directory = run / f"rank-{rank:05d}"
        return partial(DiskStates, directory=directory, bucket_bytes=optimizer.bucket_mib << 20)
    return HostStates if optimizer.state == "host" else DeviceStates


def _remove_from(run: Path, first: int) -> None:
    """State of ranks that a former run of this name had, and this one has not."""
    for directory in sorted(run.glob("rank-*")):
        if directory.name.removeprefix("rank-").isdecimal() and int(directory.name.removeprefix("rank-")) >= first:
            with state_errors():
                discard(directory)
