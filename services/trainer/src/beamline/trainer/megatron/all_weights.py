"""A model all of whose weights are trained."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import Tensor

from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.policy_files import PolicyFolder
from beamline.trainer.megatron.reference import CopiedWeights
from beamline.trainer.megatron.slots import slots_of, units_of
from beamline.trainer.shards import Slot


class AllWeights:
    """Implements `Trained`. Raises ConfigError where the bridge does more to a parameter than to move it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.folder = PolicyFolder()

    def slots(self) -> dict[str, list[Slot]]:
        return slots_of(self._model, self._tasks)

    def units(self) -> list[list[Slot]]:
        return units_of(self._model, self._tasks)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        bridge, module = self._model.bridge, self._model.module
        yield from bridge.export_hf_weights([module], show_progress=False, conversion_tasks=self._tasks)

    def reference(self) -> CopiedWeights:
        return CopiedWeights(self._model.module)

    @cached_property
    def _tasks(self) -> Any:
        return self._model.bridge.get_conversion_tasks([self._model.module])
