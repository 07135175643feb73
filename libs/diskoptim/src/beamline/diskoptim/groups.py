"""Parameters as torch takes them, with names: tensors, (name, tensor) pairs, or groups with settings of their own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[Mapping[str, Any]]


@dataclass(kw_only=True)
class Group:
    """Parameters by name and how they are updated. lr and weight_decay may be changed between steps."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    parameters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


SETTINGS = ("lr", "betas", "eps", "weight_decay")


def make_groups(params: Params, defaults: Mapping[str, Any]) -> list[Group]:
    """Groups with every setting filled in. A parameter without a name is called by its number.

    Raises ValueError for no parameters, an unknown setting, a name or tensor given twice, a parameter that is not
    contiguous or not of a float type, and parameters on several devices.
    """
    given = list(params)
    listed: list[Mapping[str, Any]] = (
        [entry for entry in given if isinstance(entry, Mapping)]
        if given and isinstance(given[0], Mapping)
        else [{"params": given}]
    )
    groups: list[Group] = []
    named: dict[str, torch.Tensor] = {}
    name_of: dict[int, str] = {}
    for entry in listed:
        if unknown := entry.keys() - {"params", *SETTINGS}:
            raise ValueError(f"a group has {sorted(unknown)}: beside params it may have {', '.join(SETTINGS)}")
        group = Group(**{key: entry.get(key, defaults[key]) for key in SETTINGS})
        _check_settings(group)
        members = entry["params"]
        for member in [members] if isinstance(members, torch.Tensor) else members:
            name, tensor = member if isinstance(member, tuple) else (str(len(named)), member)
            _check(name, tensor, named, name_of.get(id(tensor)))
            named[name] = group.parameters[name] = tensor
            name_of[id(tensor)] = name
        groups.append(group)
    if not named:
        raise ValueError("there are no parameters: give at least one")
    return groups


def _check_settings(group: Group) -> None:
    for setting in ("lr", "eps", "weight_decay"):
        if not getattr(group, setting) >= 0:
            raise ValueError(f"{setting}={getattr(group, setting)}: give 0 or more")
    if not all(0 <= beta < 1 for beta in group.betas):
        raise ValueError(f"betas={group.betas}: give two numbers from 0 to below 1")


def _check(name: str, tensor: torch.Tensor, earlier: Mapping[str, torch.Tensor], other: str | None) -> None:
    if name in earlier:
        raise ValueError(f"two parameters are named {name!r}: give every one a name of its own")
    if other is not None:
        raise ValueError(f"{name!r} is the same tensor as {other!r}: give it once")
    if not tensor.is_floating_point():
        raise ValueError(f"parameter {name!r} is {tensor.dtype}: only float types can be trained")
    if not tensor.is_contiguous():
        raise ValueError(f"parameter {name!r} is not contiguous (strides {tensor.stride()}): make it so first")
    if earlier and (device := next(iter(earlier.values())).device) != tensor.device:
        raise ValueError(f"parameter {name!r} is on {tensor.device}, others on {device}: one optimizer for each device")
