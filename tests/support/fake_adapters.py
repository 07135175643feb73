"""A policy of adapters without a model: what it keeps is made from names alone, another one after each update."""

from pathlib import Path

from adapter_checkpoints import write
from beamline.protocol.adapter import Adapter
from beamline.runtime.checkpoints import ADAPTER
from beamline.trainer.fake_policy import FakePolicy
from made_adapters import made


class FakeAdapters(FakePolicy):
    """Trains a table, and saves adapters of a model."""

    def __init__(self, vocab_size: int, adapters: list[Adapter], base: Path) -> None:
        super().__init__(vocab_size)
        self._adapters = adapters
        self._base = base

    def save_weights(self, directory: Path) -> None:
        write(directory / ADAPTER, self._adapters, self._base, made(self._adapters, seed=self.num_updates))
