"""Main weights and moments in memory, and torch's fused AdamW over them: what device and host have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from beamline.diskoptim.state_file import AdamState, write_state
from beamline.trainer.megatron.states.adam_states import AdamWSettings


class HeldStates(ABC):
    """`AdamStates` but for `step`. All tensors are on one device.

    Args:
        main: main weights of the parameters, by name.
        pinned: moments in page-locked memory, as the main weights should be.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        main: Mapping[str, Tensor],
        settings: AdamWSettings,
        *,
        pinned: bool = False,
    ) -> None:
        self.num_steps = 0
        self._parameters = parameters
        self._settings = settings
        self._states = {name: AdamState(m, _zeros(m, pinned), _zeros(m, pinned)) for name, m in main.items()}

    @property
    def num_bytes(self) -> int:
        return sum(s.main.nbytes + s.exp_avg.nbytes + s.exp_avg_sq.nbytes for s in self._states.values())

    def read(self, name: str) -> AdamState:
        return self._states[name]

    def load(self, states: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        for name, state in states:
            for field in fields(AdamState):
                getattr(self._states[name], field.name).copy_(getattr(state, field.name))
        self.num_steps = num_steps
        self.write_back(list(self._parameters))

    def write(self, folder: Path, stem: str) -> None:
        write_state(folder, stem, self._states.items(), self.num_steps)

    def close(self) -> None:
        """Nothing but memory is let go of."""
        self._states.clear()

    @abstractmethod
    def write_back(self, names: Sequence[str]) -> None:
        """These parameters get their rounded main weights."""

    def update(self, names: Sequence[str], grads: Sequence[Tensor], lr: float) -> None:
        """Some parameters' part of the step under way."""
        columns = [(self._states[name], grad) for name, grad in zip(names, grads, strict=True)]
        for decay in {self._settings.decay_of(state.main) for state, _ in columns}:
            chosen = [(s, g) for s, g in columns if self._settings.decay_of(s.main) == decay]
            adamw(
                [state.main for state, _ in chosen],
                [grad for _, grad in chosen],
                [state.exp_avg for state, _ in chosen],
                [state.exp_avg_sq for state, _ in chosen],
                [],
                _counters(len(chosen), self.num_steps, chosen[0][0].main.device),
                fused=True,
                amsgrad=False,
                beta1=self._settings.betas[0],
                beta2=self._settings.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self._settings.eps,
                maximize=False,
            )


def _zeros(main: Tensor, pinned: bool) -> Tensor:
    return torch.zeros(main.shape, dtype=torch.float32, device=main.device, pin_memory=pinned)


def _counters(num: int, num_steps: int, device: torch.device) -> list[Tensor]:
    """torch counts each of them up by one itself; they are not kept."""
    return list(torch.full((num,), float(num_steps), device=device).unbind())
