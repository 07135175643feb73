"""What a trainer's ranks hold of a model, as `benchmarks.lora_memory` finds it, and the keys of the summary.

Bytes of parameters, of gradients when a backward pass has ended, and of the optimizer's state beside the model.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from beamline.protocol.config import ParallelSection
from beamline.protocol.lora_config import LoraSection

BEAM = "reflection/Beam-1.0-501B-A23B"
KEY_LAYOUT = ParallelSection(tensor=4, expert=8, pipeline=2, data=2)
MAX_STATE_SHARE = 0.05


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A model, cut and trained in one way."""

    model: str
    dtype: str = "bfloat16"
    parallel: ParallelSection = ParallelSection()
    lora: LoraSection = LoraSection()
    """Off is full fine-tuning."""

    @property
    def layout(self) -> str:
        """As in TP4 EP8 PP2."""
        sizes = {"TP": self.parallel.tensor, "EP": self.parallel.expert, "PP": self.parallel.pipeline}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "whole"

    @property
    def trained(self) -> str:
        """What of it is."""
        if not self.lora.is_on:
            return "all weights"
        return f"LoRA {self.lora.rank}{', experts normalised' if self.lora.normalize_moe_lora else ''}"


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank."""

    rank: int
    stage: int
    """Of the pipeline."""
    parameter_bytes: int
    gradient_bytes: int
    """Float32, of all that is trained."""
    optimizer_bytes: int
    """Float32 main weights and both moments of what it looks after. A float32 parameter is its own main weight."""

    @property
    def num_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def state_bytes(self) -> int:
        """What training adds to the parameters."""
        return self.gradient_bytes + self.optimizer_bytes


class CaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a case, in their order."""

    case: Case
    ranks: list[RankMemory]

    @property
    def heaviest(self) -> RankMemory:
        """The rank that holds most, the first such one."""
        return max(self.ranks, key=lambda rank: (rank.num_bytes, -rank.rank))

    @property
    def total_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    lora_state_share: float
    """Gradients and optimizer state of Beam's heaviest rank at TP4 EP8 PP2, as a share of those of full fine-tuning."""
    lora_memory: list[CaseMemory]
    """Computed on the meta device, of every case."""
    lora_memory_measured: list[CaseMemory]
    """The tiny cases once more, in the ranks of a real trainer; they are the same to the byte."""

    GOAL: ClassVar[str] = f"goal: at most {MAX_STATE_SHARE:.0%}"


def figures_of(computed: Sequence[CaseMemory], measured: Sequence[CaseMemory]) -> MemoryFigures:
    """Raises ValueError where a real trainer holds other bytes than were computed, or Beam was left out."""
    for found in measured:
        if found not in computed:
            expected = [other.ranks for other in computed if other.case == found.case]
            raise ValueError(f"{found.case}: ranks hold {found.ranks}, computed were {expected}")
    chosen = [found for found in computed if found.case.model == BEAM and found.case.parallel == KEY_LAYOUT]
    states = {found.case.lora.is_on: found.heaviest.state_bytes for found in chosen}
    if states.keys() != {False, True}:
        raise ValueError(f"{BEAM} at {KEY_LAYOUT} is needed with adapters and without: {len(chosen)} of them are there")
    return MemoryFigures(
        lora_state_share=states[True] / states[False],
        lora_memory=list(computed),
        lora_memory_measured=list(measured),
    )


def rows(figures: MemoryFigures) -> list[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("lora_state_share", f"{figures.lora_state_share:.1%}", f"of full fine-tuning's; {figures.GOAL}"),
        *(
            (f"  {found.case.trained}, {len(found.ranks)} ranks", _size(found.heaviest.num_bytes), line(found))
            for found in figures.lora_memory
            if found.case.model == BEAM
        ),
    ]


def line(found: CaseMemory) -> str:
    """The heaviest rank's parts."""
    rank = found.heaviest
    return (
        f"rank {rank.rank} at {found.case.layout}: parameters {_size(rank.parameter_bytes)}, gradients "
        f"{_size(rank.gradient_bytes)}, optimizer {_size(rank.optimizer_bytes)}; {_size(found.total_bytes)} in all"
    )


def table(memories: Sequence[CaseMemory]) -> list[tuple[str, ...]]:
    """A heading, then the heaviest rank of each pipeline stage of each case."""
    found = [("model", "trained", "layout", "ranks", "stage", "parameters", "gradients", "optimizer", "a rank")]
    for memory in memories:
        case = memory.case
        for stage in sorted({rank.stage for rank in memory.ranks}):
            rank = CaseMemory(case=case, ranks=[rank for rank in memory.ranks if rank.stage == stage]).heaviest
            parts = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.num_bytes)
            about = (case.model, case.trained, case.layout, str(len(memory.ranks)), str(stage))
            found.append((*about, *(_size(part) for part in parts)))
    return found


def _size(num_bytes: int) -> str:
    """In GiB, or in MiB where that says more."""
    if num_bytes >= 2**30 or num_bytes == 0:
        return f"{num_bytes / 2**30:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
