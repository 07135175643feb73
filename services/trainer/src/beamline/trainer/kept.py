"""What of a policy lies in checkpoints and exports: all of its weights, or the adapters that a run trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.adapter_merge import adapters_in, merge
from beamline.runtime.base_identity import BaseIdentity
from beamline.runtime.checkpoint_manifest import Advance
from beamline.runtime.checkpoints import ADAPTER, POLICY
from beamline.runtime.model_description import describe

MERGED = "merged"


class Kept(Protocol):
    """One of the two. The policy writes its tensors into `folder` itself (`Policy.save`)."""

    @property
    def folder(self) -> str:
        """Below that of a checkpoint or an export."""
        ...

    @property
    def model_folder(self) -> str:
        """Of an export, the one that holds a whole model."""
        ...

    def describe(self, folder: Path) -> None:
        """Write what belongs beside the tensors into `folder`, which is there."""
        ...

    def complete(self, draft: Path, advance: Advance) -> None:
        """Add to an export, whose `folder` is filled, what makes a whole model of it; what `advance` raises ends it.

        Raises WeightError or OSError where that fails.
        """
        ...

    def facts(self) -> Mapping[str, Any]:
        """The part of `TrainerState` that tells what is held."""
        ...


@dataclass(frozen=True)
class WholePolicy:
    """Implements `Kept`: a Hugging Face directory."""

    model_dir: Path
    dtype: str
    folder: str = POLICY
    model_folder: str = POLICY

    def describe(self, folder: Path) -> None:
        describe(self.model_dir, folder, self.dtype)

    def complete(self, draft: Path, advance: Advance) -> None:
        """It is one already."""

    def facts(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True)
class AdaptersAlone:
    """Implements `Kept`: adapters in PEFT's format; in an export beside the model with them merged into it."""

    model_dir: Path
    lora: LoraSection
    base: BaseIdentity
    """The model as it was when the run began."""
    folder: str = ADAPTER
    model_folder: str = MERGED

    @classmethod
    def of(cls, model_dir: Path, lora: LoraSection) -> "AdaptersAlone":
        """Raises WeightError for a directory without weights, or with a damaged file."""
        return cls(model_dir, lora, BaseIdentity.of(model_dir))

    def describe(self, folder: Path) -> None:
        """Their description is written with them."""

    def complete(self, draft: Path, advance: Advance) -> None:
        if not BaseIdentity.of(self.model_dir).is_of(self.base):
            raise WeightError(f"{self.model_dir} has other weights than when the run began: adapters do not fit them")
        merged = draft / MERGED
        merged.mkdir(exist_ok=True)
        describe(self.model_dir, merged)
        merge(self.model_dir, adapters_in(self.model_dir, self.lora), draft / ADAPTER, merged, advance)

    def facts(self) -> Mapping[str, Any]:
        return {"base": self.base, "lora": self.lora}
