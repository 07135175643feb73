"""State beside the model, on its device."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from beamline.diskoptim.state_file import AdamState, write_state
from beamline.trainer.megatron.states.adam_states import AdamWSettings
from beamline.trainer.megatron.states.held import HeldStates


class DeviceStates:
    """Implements `AdamStates`. A float32 parameter is its own main weight."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> None:
        self.num_steps = 0
        self._parameters = parameters
        main = {name: p.detach() if p.dtype == torch.float32 else p.detach().float() for name, p in parameters.items()}
        self._held = HeldStates.of(main, settings)

    @property
    def num_bytes(self) -> int:
        return self._held.num_bytes

    def step(self, lr: float) -> None:
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        self._held.update(list(self._parameters), grads, lr, self.num_steps)
        self.num_steps += 1
        self._write_back()

    def read(self, name: str) -> AdamState:
        return self._held.states[name]

    def load(self, states: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        for name, state in states:
            self._held.put(name, state)
        self.num_steps = num_steps
        self._write_back()

    def write(self, folder: Path, stem: str) -> None:
        write_state(folder, stem, self._held.states.items(), self.num_steps)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _write_back(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                parameter.data.copy_(self._held.states[name].main)
