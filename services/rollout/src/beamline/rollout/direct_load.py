"""Policies after the first one: each tensor is copied to where the first one's went, and packed as vLLM packs.

vLLM's own way to load a model once more runs every loader twice and builds every layer anew; for a small model that is
most of the time that a policy takes to be activated. Here nothing is left but copying and packing. What went where was
recorded while the first policy was loaded (see needs_recorder.py), and counts only where copying by the record gives
what the loaders gave. Modules for which it does not are loaded by vLLM as before. On a CPU only: packed parameters are
replaced, which graphs that were captured on a device would not see.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from beamline.rollout.needs_recorder import Need, Target


@dataclass(eq=False)
class _Parameter:
    """A parameter as it was before it was packed."""

    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    stays: bool
    """It keeps its memory, which others look into or nobody packs."""
    values: torch.Tensor | None = None
    """New ones, between the first tensor that is copied and packing."""

    def place_of(self, target: Target) -> torch.Tensor:
        """Where a tensor's part belongs."""
        if self.values is None:
            self.values = self.parameter.data if self.stays else torch.empty(self.shape, dtype=self.dtype)
        offset = target.offset_bytes // self.values.itemsize
        return self.values.as_strided(target.shape, target.stride, offset)


@dataclass(eq=False)
class _Module:
    """A module that is loaded directly."""

    module: nn.Module
    parameters: dict[str, _Parameter]
    tensors: set[str] = field(default_factory=set[str])
    """That its parameters are made of."""

    def finish(self) -> None:
        """All of its tensors have been copied: make them its parameters and pack them."""
        method: Any = getattr(self.module, "quant_method", None)
        for name, one in self.parameters.items():
            if not one.stays and one.values is not None:
                self.module.get_parameter(name).data = one.values
            one.values = None
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(self.module)


class DirectLoad:
    """Loads policies into one model. Make it when the first one is loaded and nothing is packed yet.

    Args:
        model: as its loaders have left it.
        needs: what they have kept.
        loaded: the tensors that they were given.
        dtype: of the engine.
    """

    def __init__(
        self, model: nn.Module, needs: Mapping[str, Need], loaded: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._attention: list[Any] = [module for module in model.modules() if is_deferred_attention_layer(module)]
        parameters = _parameters_of(model)
        self._places = _places_of(parameters.values(), needs, loaded)
        """Of each tensor that can be copied: the parameters that it goes to, and the parts of it."""
        self._modules = self._fit(_modules_of(model, parameters), needs)
        self.names = {name for module in self._modules for name in module.tensors}
        """Of the tensors that are loaded directly."""
        self.left = needs.keys() - self.names
        """Of those that are to be loaded in vLLM's way."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors of `names`, in any order. Nothing may be computed with the model meanwhile."""
        missing = {module: set(module.tensors) for module in self._modules}
        users: dict[str, list[_Module]] = {}
        for module in self._modules:
            for name in module.tensors:
                users.setdefault(name, []).append(module)
        for name, tensor in tensors:
            for parameter, target in self._places[name]:
                parameter.place_of(target).copy_(_cut(tensor, target))
            for module in users[name]:
                missing[module].discard(name)
                if not missing[module]:
                    module.finish()
        for layer in self._attention:
            layer.process_weights_after_loading(self._dtype)

    def _fit(self, modules: list[_Module], needs: Mapping[str, Need]) -> list[_Module]:
        """The modules of which every parameter is made up by tensors that can be copied, and by all that they need."""
        made_of: dict[_Parameter, set[str]] = {}
        covered = Counter[_Parameter]()
        for name, places in self._places.items():
            for parameter, target in places:
                made_of.setdefault(parameter, set()).add(name)
                covered[parameter] += target.num_bytes
        fit: list[_Module] = []
        for module in modules:
            whole = all(covered[one] == one.shape.numel() * one.dtype.itemsize for one in module.parameters.values())
            if module.parameters and whole:
                module.tensors = {name for one in module.parameters.values() for name in made_of[one]}
                fit.append(module)
        # vLLM loads a tensor into all modules that it belongs to: none of them may be loaded here then.
        while True:
            own = {one for module in fit for one in module.parameters.values()}
            mixed = {
                name
                for name in needs
                if name not in self._places or any(one not in own for one, _ in self._places[name])
            }
            left = [module for module in fit if module.tensors & mixed]
            if not left:
                return fit
            fit = [module for module in fit if module not in left]


def _parameters_of(model: nn.Module) -> dict[int, _Parameter]:
    """Every parameter once, by the id of what it is now."""
    owners: dict[int, list[nn.Module]] = {}
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
            found[id(parameter)] = parameter
    return {
        key: _Parameter(
            parameter=parameter,
            shape=parameter.shape,
            dtype=parameter.dtype,
            stays=len(owners[key]) > 1
            or not isinstance(getattr(owners[key][0], "quant_method", None), QuantizeMethodBase),
        )
        for key, parameter in found.items()
    }


def _modules_of(model: nn.Module, parameters: Mapping[int, _Parameter]) -> list[_Module]:
    return [
        _Module(module, {name: parameters[id(one)] for name, one in module.named_parameters(recurse=False)})
        for module in model.modules()
    ]


def _places_of(
    parameters: Iterable[_Parameter], needs: Mapping[str, Need], loaded: Mapping[str, torch.Tensor]
) -> dict[str, list[tuple[_Parameter, Target]]]:
    """Where each tensor goes that copying brings to where the loaders have brought it."""
    by_storage = {
        one.parameter.untyped_storage().data_ptr(): one
        for one in parameters
        if one.parameter.is_contiguous() and one.parameter.untyped_storage().nbytes() == one.parameter.nbytes
    }
    places: dict[str, list[tuple[_Parameter, Target]]] = {}
    for name, need in needs.items():
        found = [(by_storage[target.storage], target) for target in need.targets if target.storage in by_storage]
        if len(found) == len(need.targets) == need.num_reads and all(
            target.is_box and _is_there(one.parameter, target, loaded[name]) for one, target in found
        ):
            places[name] = found
    return places


def _is_there(parameter: nn.Parameter, target: Target, tensor: torch.Tensor) -> bool:
    offset = target.offset_bytes // parameter.itemsize
    held = parameter.data.as_strided(target.shape, target.stride, offset)
    return torch.equal(held, _cut(tensor, target).to(held.dtype))


def _cut(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """What of a tensor belongs to the target, in its shape."""
    return tensor[tuple(slice(*edges) for edges in target.box)].reshape(target.shape)
