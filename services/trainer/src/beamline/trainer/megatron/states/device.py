"""State beside the model, on its device."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from beamline.trainer.megatron.states.adam_states import AdamWSettings
from beamline.trainer.megatron.states.held import HeldStates


class DeviceStates(HeldStates):
    """Implements `AdamStates`. A float32 parameter is its own main weight."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> None:
        main = {name: p.detach() if p.dtype == torch.float32 else p.detach().float() for name, p in parameters.items()}
        super().__init__(parameters, main, settings)

    def step(self, lr: float) -> None:
        names = list(self._parameters)
        self.update(names, [p.grad for p in self._parameters.values() if p.grad is not None], lr)
        self.num_steps += 1
        self.write_back(names)

    def write_back(self, names: Sequence[str]) -> None:
        for name in names:
            if self._parameters[name].dtype != torch.float32:
                self._parameters[name].data.copy_(self._states[name].main)
