"""The folder of a run, `<run.dir>/<run.name>`: made once, taken over by a run that goes on, never replaced unasked.

config.json    the configuration that the services read: paths absolute, names resolved, threads counted
model/ data/   what the recipe names as `asset:` or `task:`
logs/          one file a worker, and the broker's; a link where run.log_path names another folder
credentials/   one file a bus user
"""

import fcntl
import os
import shutil
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from beamline.coordinator.launch import leftovers, preflight
from beamline.coordinator.launch.log_folder import place_logs, remove_logs
from beamline.coordinator.launch.materials import Materials
from beamline.coordinator.launch.resume import Origin, Say, find_origin, starting_from
from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.run_files import run_dir, write_config

LOCK_FILE = "launcher.lock"


class RunFolder:
    """Held by one launcher at a time, by a lock on a file in it."""

    def __init__(self, path: Path, lock: TextIO, *, is_taken_over: bool) -> None:
        self.path = path
        self._lock = lock
        self._is_taken_over = is_taken_over

    @classmethod
    def create(cls, config: RunConfig, *, overwrite: bool) -> "RunFolder":
        """Make the run's folder, or take over that of the run which is to go on (`trainer.resume_mode=latest`).

        Raises:
            ConfigError: it exists and neither is asked for, holds something else, is in use or still being left, or has
                the checkpoint in it that the new run is to start from.
        """
        path = run_dir(config)
        is_there = path.exists() and any(path.iterdir())
        is_taken_over = is_there and not overwrite
        if is_taken_over and config.trainer.resume_mode != "latest":
            raise ConfigError(
                f"{path} exists already: name the new run otherwise (run.name={path.name}-2), go on with the old one "
                "by trainer.resume_mode=latest, or replace it with --overwrite"
            )
        if is_there:
            _refuse_unfit(path)
            leftovers.await_end(path)
        if is_there and overwrite:
            _refuse_own_checkpoint(path, config.trainer.resume_path)
            remove_logs(path)
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, _locked(path), is_taken_over=is_taken_over)

    def fill(self, config: RunConfig, say: Say) -> RunConfig:
        """Write the model and the data, find the checkpoint that the run goes on from, and write `config.json`.

        Returns the configuration as the services will read it. What fails half-way leaves no folder, or the earlier
        run's as it was.

        Raises:
            ConfigError: the model that the recipe names by `asset:` does not fit the recipe, or a checkpoint cannot be
                used.
        """
        try:
            place_logs(self.path, config.run.log_path)
            placed = self._place(config)
            preflight.check_model(placed)
            return self.begin(placed, find_origin(placed, self.path, begun=self._is_taken_over, say=say))
        except BaseException:
            if not self._is_taken_over:
                shutil.rmtree(self.path)
            raise

    def begin(self, placed: RunConfig, origin: Origin | None) -> RunConfig:
        """Make the folder ready for a start from a checkpoint, or from the model; returns its configuration."""
        leftovers.clear(self.path)
        config = starting_from(placed, origin)
        write_config(self.path, config)
        return config

    def release(self) -> None:
        """Give up the folder."""
        self._lock.close()

    def _place(self, config: RunConfig) -> RunConfig:
        materials = Materials(self.path)
        return replace(
            config,
            run=replace(config.run, dir=str(self.path.parent)),
            model=replace(config.model, path=materials.place_model(config.model.path)),
            data=materials.place_data(config.data),
            rollout=replace(config.rollout, engine=replace(config.rollout.engine, threads=rollout_threads(config))),
            trainer=replace(config.trainer, threads=trainer_threads(config)),
        )


def _refuse_unfit(path: Path) -> None:
    """Raises ConfigError where a folder is not that of a run which has ended."""
    if not (path / LOCK_FILE).is_file():
        raise ConfigError(f"{path} is not the folder of a run, so it is not replaced: use another run.name")
    if in_use(path):
        raise ConfigError(f"{path} is in use by a run: end it with `beamline stop {path.name}`")


def _refuse_own_checkpoint(path: Path, resume_path: str) -> None:
    """Raises ConfigError where replacing the folder would remove the checkpoint to start from."""
    if resume_path and Path(resume_path).resolve().is_relative_to(path):
        raise ConfigError(
            f"trainer.resume_path={resume_path} lies in {path}, which --overwrite would remove: use another run.name, "
            "or trainer.resume_mode=latest without --overwrite"
        )


def _locked(path: Path) -> TextIO:
    lock = (path / LOCK_FILE).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"{path} is being set up by another launcher: use another run.name") from None
    return lock


def in_use(path: Path) -> bool:
    """Whether a launcher holds the folder."""
    lock = path / LOCK_FILE
    if not lock.is_file():
        return False
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def rollout_threads(config: RunConfig) -> int:
    """CPU threads of one rollout worker: as the recipe says, or its share of the machine."""
    return config.rollout.engine.threads or max(1, _device_threads(config) // config.rollout.replicas)


def trainer_threads(config: RunConfig) -> int:
    """CPU threads of the trainer: as the recipe says, or its share of the machine."""
    return config.trainer.threads or _device_threads(config)


def _device_threads(config: RunConfig) -> int:
    """All cores for services that take turns, half of them for services that do not."""
    num_cores = len(os.sched_getaffinity(0))
    return num_cores if config.run.placement is Placement.COLOCATED else max(1, num_cores // 2)
