"""The folder of a run, `<run.dir>/<run.name>`: made once, held by its launcher, and never replaced unasked.

config.json    the configuration that the services read: paths absolute, names resolved, threads counted
model/ data/   what the recipe names as `asset:` or `task:`
logs/          one file a worker, and the broker's
credentials/   one file a bus user
"""

import fcntl
import os
import shutil
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from beamline.coordinator.launch import preflight
from beamline.models import assets, chained_sums
from beamline.models.datasets import PromptRow, write_rows
from beamline.protocol.config import DataSection, EvalSet, Placement, RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.run_files import run_dir, write_config

LOCK_FILE = "launcher.lock"


class RunFolder:
    """Held by one launcher at a time, by a lock on a file in it."""

    def __init__(self, path: Path, lock: TextIO) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, config: RunConfig, *, overwrite: bool) -> "RunFolder":
        """Make the run's folder.

        Raises:
            ConfigError: it exists and `overwrite` is not asked for, holds something else, or is in use.
        """
        path = run_dir(config)
        if path.exists() and any(path.iterdir()):
            if not overwrite:
                raise ConfigError(
                    f"{path} exists already: name the new run otherwise (run.name={path.name}-2), or replace the old "
                    "one with --overwrite"
                )
            if not (path / LOCK_FILE).is_file():
                raise ConfigError(f"{path} is not the folder of a run, so it is not replaced: use another run.name")
            if in_use(path):
                raise ConfigError(f"{path} is in use by a run: end it with `beamline stop {path.name}`")
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK_FILE).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"{path} is being set up by another launcher: use another run.name") from None
        return cls(path, lock)

    def fill(self, config: RunConfig) -> RunConfig:
        """Write the model, the data and `config.json`; returns the configuration as the services will read it.

        What fails half-way leaves no folder.

        Raises:
            ConfigError: the model that the recipe names by `asset:` does not fit the recipe.
        """
        try:
            return self._fill(config)
        except BaseException:
            shutil.rmtree(self.path)
            raise

    def release(self) -> None:
        """Give up the folder."""
        self._lock.close()

    def _fill(self, config: RunConfig) -> RunConfig:
        model_path = config.model.path
        if model_path.startswith(preflight.ASSET):
            model_path = str(assets.materialise(model_path.removeprefix(preflight.ASSET), self.path / "model"))
        placed = replace(
            config,
            run=replace(config.run, dir=str(self.path.parent)),
            model=replace(config.model, path=str(Path(model_path).resolve())),
            data=self._fill_data(config.data),
            rollout=replace(config.rollout, engine=replace(config.rollout.engine, threads=rollout_threads(config))),
            trainer=replace(config.trainer, threads=trainer_threads(config)),
        )
        preflight.check_model(placed)
        write_config(self.path, placed)
        return placed

    def _fill_data(self, data: DataSection) -> DataSection:
        return replace(
            data,
            train=self._fill_train(data.train),
            evals=[replace(evaluation, path=self._fill_eval(evaluation)) for evaluation in data.evals],
        )

    def _fill_train(self, path: str) -> str:
        if path != preflight.CHAINED_SUMS:
            return str(Path(path).resolve())
        return self._write_problems("train", chained_sums.train_problems())

    def _fill_eval(self, evaluation: EvalSet) -> str:
        if evaluation.path != preflight.CHAINED_SUMS:
            return str(Path(evaluation.path).resolve())
        number = evaluation.max_problems or chained_sums.MAX_EVAL_PROBLEMS
        return self._write_problems(f"eval-{number}", chained_sums.eval_problems(number))

    def _write_problems(self, split: str, problems: list[chained_sums.Problem]) -> str:
        rows = (
            PromptRow(
                data_source=chained_sums.DATA_SOURCE,
                messages=({"role": "user", "content": problem.prompt},),
                ground_truth=str(problem.answer),
                index=index,
                split=split,
            )
            for index, problem in enumerate(problems)
        )
        return str(write_rows(self.path / "data" / f"{chained_sums.DATA_SOURCE}-{split}.parquet", rows))


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
