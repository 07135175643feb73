"""Main weights and moments in memory, and torch's fused AdamW over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from beamline.diskoptim.state_file import AdamState
from beamline.trainer.megatron.states.adam_states import AdamWSettings


@dataclass(frozen=True)
class HeldStates:
    """By parameter name; all tensors of one state are on one device."""

    states: Mapping[str, AdamState]
    settings: AdamWSettings

    @classmethod
    def of(cls, main: Mapping[str, Tensor], settings: AdamWSettings, pinned: bool = False) -> "HeldStates":
        """Moments of zero beside main weights.

        Args:
            pinned: moments in page-locked memory, as the main weights should be.
        """
        states = {name: AdamState(m, _zeros(m, pinned), _zeros(m, pinned)) for name, m in main.items()}
        return cls(states, settings)

    def update(self, names: Sequence[str], grads: Sequence[Tensor], lr: float, num_steps: int) -> None:
        """One step of some parameters, the first being step 1 after `num_steps` of 0."""
        columns = [(self.states[name], grad) for name, grad in zip(names, grads, strict=True)]
        for decay in {self.settings.decay_of(state.main) for state, _ in columns}:
            chosen = [(s, g) for s, g in columns if self.settings.decay_of(s.main) == decay]
            adamw(
                [state.main for state, _ in chosen],
                [grad for _, grad in chosen],
                [state.exp_avg for state, _ in chosen],
                [state.exp_avg_sq for state, _ in chosen],
                [],
                _counters(len(chosen), num_steps, chosen[0][0].main.device),
                fused=True,
                amsgrad=False,
                beta1=self.settings.betas[0],
                beta2=self.settings.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self.settings.eps,
                maximize=False,
            )

    def put(self, name: str, state: AdamState) -> None:
        """Copy a state in."""
        for field in fields(AdamState):
            getattr(self.states[name], field.name).copy_(getattr(state, field.name))

    @property
    def num_bytes(self) -> int:
        return sum(s.main.nbytes + s.exp_avg.nbytes + s.exp_avg_sq.nbytes for s in self.states.values())


def _zeros(main: Tensor, pinned: bool) -> Tensor:
    return torch.zeros(main.shape, dtype=torch.float32, device=main.device, pin_memory=pinned)


def _counters(num: int, num_steps: int, device: torch.device) -> list[Tensor]:
    """torch counts each of them up by one itself; they are not kept."""
    return list(torch.full((num,), float(num_steps), device=device).unbind())
