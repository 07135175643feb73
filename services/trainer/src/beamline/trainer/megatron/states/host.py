"""State in host memory, updated there: the device keeps weights and gradients alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from beamline.diskoptim.state_file import AdamState
from beamline.trainer.megatron.buckets import buckets_of
from beamline.trainer.megatron.states.adam_states import AdamWSettings
from beamline.trainer.megatron.states.held import HeldStates

STAGE_BYTES = 64 * 1024**2
"""Gradients that come from a GPU at a time; as many again are on their way meanwhile."""


class HostStates(HeldStates):
    """Implements `AdamStates`. Memory is page-locked where the parameters are on a GPU."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> None:
        self._on_gpu = any(p.is_cuda for p in parameters.values())
        main = {name: self._on_host(p) for name, p in parameters.items()}
        super().__init__(parameters, main, settings, pinned=self._on_gpu)
        self._buckets = list(buckets_of(parameters, STAGE_BYTES))

    def step(self, lr: float) -> None:
        for names, grads in self._staged():
            self.update(names, grads, lr)
            self.write_back(names)
        self.num_steps += 1
        self._settle()

    def load(self, states: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        super().load(states, num_steps)
        self._settle()

    def _on_host(self, parameter: Tensor) -> Tensor:
        copy = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=self._on_gpu)
        return copy.copy_(parameter.detach())

    def _staged(self) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        """Gradients in host memory, a bucket at a time; the next one's come while this one's are used."""
        coming = [self._fetch(names) for names in self._buckets[:1]]
        for number, names in enumerate(self._buckets):
            grads, arrived = coming.pop()
            coming += [self._fetch(following) for following in self._buckets[number + 1 : number + 2]]
            if arrived is not None:
                arrived.synchronize()
            yield names, grads

    def _fetch(self, names: Sequence[str]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        grads = [grad for name in names if (grad := self._parameters[name].grad) is not None]
        if not self._on_gpu:
            return grads, None
        copies = [torch.empty(g.shape, dtype=g.dtype, pin_memory=True).copy_(g, non_blocking=True) for g in grads]
        arrived = torch.cuda.Event()
        arrived.record()
        return copies, arrived

    def write_back(self, names: Sequence[str]) -> None:
        for name in names:
            self._parameters[name].data.copy_(self._states[name].main, non_blocking=True)

    def _settle(self) -> None:
        """Main weights may change again once they have left."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
