"""The state of AdamW, as the optimizer sees it wherever it lies."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from beamline.diskoptim.state_file import AdamState


@dataclass(frozen=True)
class AdamWSettings:
    """Decoupled weight decay (arXiv 1711.05101), on matrices alone."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def decay_of(self, parameter: Tensor) -> float:
        """Weight decay of one parameter."""
        return self.weight_decay if parameter.dim() > 1 else 0.0


class AdamStates(Protocol):
    """Float32 main weights and both moments of some parameters, 12 bytes each; all have taken as many steps."""

    @property
    def num_steps(self) -> int:
        """Updates so far."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of main weights and moments; a float32 parameter may be its own main weight."""
        ...

    def step(self, lr: float) -> None:
        """Update by each parameter's `.grad`, float32 and clipped already; parameters get the rounded main weights.

        Gradients are not needed afterwards, and may have been spoilt.
        """
        ...

    def read(self, name: str) -> AdamState:
        """Of one parameter; valid until the next step."""
        ...

    def load(self, states: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        """Take over the states of all parameters, which get the rounded main weights."""
        ...

    def write(self, folder: Path, stem: str) -> None:
        """As a file of `beamline.diskoptim`: `<stem>.state` and `<stem>.json`."""
        ...

    def close(self) -> None:
        """Let go of what is held outside of memory."""
        ...


type MakeStates = Callable[[Mapping[str, nn.Parameter], AdamWSettings], AdamStates]
"""Fresh states of the parameters as they are: main weights equal to them, moments of zero."""
