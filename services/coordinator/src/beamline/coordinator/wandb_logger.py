"""Weights & Biases, in `<run folder>/wandb`: offline where there is no key. Only this file imports wandb.

The library's own settings hold: WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY and the rest; WANDB_PROJECT where `run.project`
names none.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import wandb

from beamline.protocol.config import RunConfig

PROJECT = "beamline"
"""Where neither the run nor WANDB_PROJECT names one."""


class WandbLogger:
    """One run of wandb's.

    `wandb sync <run folder>/wandb/offline-run-*` uploads what was written without a key.

    Args:
        run_dir: the run's folder.
        config: shown as the run's configuration.
    """

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        given = wandb.setup().settings
        mode = given.mode if given.api_key or given.mode != "online" else "offline"
        # Console, code and machine are the run folder's and the services' own business.
        settings = wandb.Settings(
            mode=mode,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self._run = wandb.init(
            project=config.run.project or given.project or PROJECT,
            name=config.run.name,
            group=config.run.name,
            dir=str(run_dir),
            config=msgspec.to_builtins(config),
            settings=settings,
        )
        # A step may be told in parts, and the next one's before all of them are there.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One row of the history."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Write, or upload, what is left."""
        self._run.finish()
        wandb.teardown()  # its process may still be writing when `finish` returns
