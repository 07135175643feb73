"""AdamW of one rank: gradients summed over the ranks and clipped, each parameter's state kept on one of its holders.

Gradients are float32, whatever the type of the weights: each backward pass adds into them.
"""

from collections.abc import Iterable, Mapping

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from beamline.diskoptim.state_file import AdamState
from beamline.trainer.megatron import gradients
from beamline.trainer.megatron.owners import Owners
from beamline.trainer.megatron.states.adam_states import AdamWSettings, MakeStates
from beamline.trainer.megatron.states.device import DeviceStates
from beamline.trainer.policy import NotFinite


class ShardedAdamW:
    """The optimizer of a module's parameters but those that are frozen, `states` being what this rank looks after.

    Args:
        make_states: where main weights and moments are kept.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ProcessGroupCollection,
        settings: AdamWSettings,
        make_states: MakeStates = DeviceStates,
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for parameter in self._parameters.values():
            parameter.grad_dtype = torch.float32
        self._owners = Owners(self._parameters, groups)
        self.states = make_states(self._owners.own, settings)

    @property
    def own(self) -> Mapping[str, nn.Parameter]:
        """The parameters whose state this rank keeps."""
        return self._owners.own

    def step(self, lr: float) -> float:
        """Sum gradients over the ranks, clip their norm, update, clear; returns the norm before clipping.

        Raises NotFinite before anything changed, but for the gradients, which are cleared.
        """
        named = list(self._parameters.items())
        gradients.sum_over_ranks(named, self._groups)
        norm = gradients.norm(named, self._groups)
        if not norm < float("inf"):
            self.clear()
            raise NotFinite(f"gradient norm is {norm}")
        if norm > self._settings.max_grad_norm:
            gradients.scale(self._owners.own.values(), self._settings.max_grad_norm / norm)
        self.states.step(lr)
        self.clear()
        self._owners.spread()
        return norm

    def clear(self) -> None:
        """Drop all gradients and their memory."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def gradient_bytes(self) -> int:
        """What gradients of this rank still take."""
        return sum(p.grad.nbytes for p in self._parameters.values() if p.grad is not None)

    def load(self, states: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        """Take over the states of the parameters that this rank looks after; all ranks get the main weights."""
        self.states.load(states, num_steps)
        self._owners.spread()
