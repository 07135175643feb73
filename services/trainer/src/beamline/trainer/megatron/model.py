"""This rank's part of a Megatron model, and what of it a run trains."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from beamline.trainer.megatron.policy_files import Folder
from beamline.trainer.shards import Slot


class Reference(Protocol):
    """The model as it was before the first update."""

    def in_place(self) -> AbstractContextManager[None]:
        """The module computes as the reference; afterwards as itself again, whatever happened.

        No gradient may be pending, and none be taken inside.
        """
        ...


class Trained(Protocol):
    """What of a model changes, and so all of it that is exported and saved."""

    @property
    def folder(self) -> Folder:
        """Where and how it lies in a checkpoint."""
        ...

    def slots(self) -> Mapping[str, Sequence[Slot]]:
        """All that this rank holds, whoever exports it, by the name of parameter or buffer; each element once."""
        ...

    def units(self) -> list[list[Slot]]:
        """What this rank exports, as `shards.shards_of` takes it. Those of all ranks are every tensor, once each."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor whole, under its Hugging Face name. It gathers: all ranks take part."""
        ...

    def reference(self) -> Reference:
        """The model as it is now, for good; of all weights it takes their memory once more."""
        ...


@dataclass(frozen=True)
class Model:
    """This rank's part of the model, and the bridge to its Hugging Face names."""

    bridge: AutoBridge
    module: Any
    """HybridModel or GPTModel; its forward returns hidden states before the output layer."""
    config: Any
    groups: ProcessGroupCollection
    path: Path
    adapters: Trained | None = None
    """Where adapters alone are trained."""
