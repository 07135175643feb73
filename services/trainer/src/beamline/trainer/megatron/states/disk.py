"""State on a local disk, streamed through memory in buckets."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from beamline.diskoptim.directory import SLOTS, Generations
from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.header import header_path, state_path
from beamline.diskoptim.state_file import AdamState
from beamline.protocol.errors import ConfigError
from beamline.trainer.megatron.states.adam_states import AdamWSettings
from beamline.trainer.megatron.states.errors import state_errors

BUCKET_BYTES = 256 * 1024**2
_OURS = (*SLOTS, "lock", "")
"""Beginnings of names; the probe for O_DIRECT begins with a dot."""


class DiskStates:
    """Implements `AdamStates`. Close it: another process may not use the directory before.

    State that a former run has left in the directory is replaced: it is of weights that are gone.

    Raises:
        ConfigError: the directory cannot be used, is another process's, or holds what is no optimizer state.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: AdamWSettings,
        *,
        directory: Path,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._num_elements = sum(p.numel() for p in parameters.values())
        groups = [
            {
                "params": [named for named in parameters.items() if settings.decay_of(named[1]) == decay],
                "weight_decay": decay,
            }
            for decay in sorted({settings.decay_of(p) for p in parameters.values()})
        ]
        with state_errors():
            discard(directory)
            self._adamw = DiskAdamW(
                groups, directory, lr=0.0, betas=settings.betas, eps=settings.eps, bucket_bytes=bucket_bytes
            )

    @property
    def num_steps(self) -> int:
        return self._adamw.num_steps

    @property
    def num_bytes(self) -> int:
        return 12 * self._num_elements

    def step(self, lr: float) -> None:
        with state_errors():
            self._adamw.step(lr=lr)

    def read(self, name: str) -> AdamState:
        with state_errors():
            return self._adamw.read(name)

    def load(self, states: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        with state_errors():
            self._adamw.import_state(states, num_steps)
            self._adamw.load_params()

    def write(self, folder: Path, stem: str) -> None:
        self._adamw.snapshot(folder, stem)

    def close(self) -> None:
        self._adamw.close()


def discard(directory: Path) -> None:
    """Remove the state in a directory, which may be missing.

    Raises:
        ConfigError: it has files that are no optimizer state.
        DiskOptimError: another process uses it, or what is there is damaged.
    """
    if not directory.is_dir():
        return
    if foreign := sorted(path.name for path in directory.iterdir() if path.name.split(".")[0] not in _OURS):
        raise ConfigError(
            f"{directory} is for optimizer state, and has {foreign[0]!r} in it: name another trainer.optimizer."
            "state_dir, or another run.name"
        )
    generations = Generations(directory)
    try:
        for slot in SLOTS:
            header_path(directory, slot).unlink(missing_ok=True)
            state_path(directory, slot).unlink(missing_ok=True)
    finally:
        generations.close()
