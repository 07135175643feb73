"""One bucket's AdamW update by torch's own fused kernel, where the parameters are.

Gradients are scaled into memory of their own, as long as a section of a bucket, so that the caller's stay as they are
and a step that failed can be repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from beamline.diskoptim.buffers import Buffer
from beamline.diskoptim.groups import Group
from beamline.diskoptim.layout import Placement


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, as every bucket takes it."""

    gradients: Mapping[str, torch.Tensor]
    """Flat, by parameter."""
    factors: tuple[float, ...]
    """What they are multiplied by, one after the other; each rounds."""
    number: int
    """Counted from 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """`length` elements of a parameter from `start`, at `position` of a bucket."""

    name: str
    start: int
    position: int
    length: int


Batch = tuple[Group, list[Part]]
"""Neighbours of one group: one call of the kernel."""


def plan_updates(groups: Sequence[Group], placements: Mapping[str, Placement]) -> dict[int, list[Batch]]:
    """Which calls of the kernel update each bucket. Few and large ones: threads meet at the end of each."""
    group_of = {name: group for group in groups for name in group.parameters}
    buckets: dict[int, list[Batch]] = {}
    for name, place in placements.items():
        for start, piece in zip(place.starts, place.pieces, strict=True):
            batches = buckets.setdefault(piece.bucket, [])
            if not batches or batches[-1][0] is not group_of[name]:
                batches.append((group_of[name], []))
            batches[-1][1].append(Part(name, start, piece.position, piece.length))
    return buckets


class HostUpdate:
    """In the host's memory, on the buffer itself."""

    def __init__(self, plan: Mapping[int, Sequence[Batch]], buffers: Sequence[Buffer]) -> None:
        self._plan = plan
        self._scratch = torch.empty(buffers[0].values.shape[1])

    def __call__(self, index: int, buffer: Buffer, step: Step) -> None:
        """Update bucket `index` in place, and the parameters with it."""
        update_values(self._plan[index], buffer.values, step, self._scratch)


class DeviceUpdate:
    """On a GPU, in a stream of its own: pinned buffer to the device, update, and back."""

    def __init__(self, plan: Mapping[int, Sequence[Batch]], buffers: Sequence[Buffer], device: torch.device) -> None:
        for buffer in buffers:
            buffer.pin()
        self._plan = plan
        self._values = torch.empty_like(buffers[0].values, device=device)
        self._scratch = torch.empty_like(self._values[0])
        self._stream = torch.cuda.Stream(device)

    def __call__(self, index: int, buffer: Buffer, step: Step) -> None:
        """As HostUpdate's. Returns when the bucket is in the buffer again; reading and writing go on meanwhile."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._values.copy_(buffer.values, non_blocking=True)
            update_values(self._plan[index], self._values, step, self._scratch)
            buffer.values.copy_(self._values, non_blocking=True)
        self._stream.synchronize()


@torch.no_grad()
def update_values(batches: Sequence[Batch], values: torch.Tensor, step: Step, scratch: torch.Tensor) -> None:
    """AdamW on the parts of a bucket whose [section, capacity] is `values`; then the weights, rounded, to the
    parameters."""
    main, exp_avg, exp_avg_sq = values
    number = torch.tensor(float(step.number), device=values.device)
    for group, parts in batches:
        slices = [slice(part.position, part.position + part.length) for part in parts]
        mains = [main[place] for place in slices]
        torch.ops.aten._fused_adamw_(
            mains,
            _scaled(parts, step, scratch),
            [exp_avg[place] for place in slices],
            [exp_avg_sq[place] for place in slices],
            [],
            [number] * len(parts),
            lr=group.lr,
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay,
            eps=group.eps,
            amsgrad=False,
            maximize=False,
        )
        for part, weights in zip(parts, mains, strict=True):
            parameter = group.parameters[part.name].view(-1)
            parameter[part.start : part.start + part.length].copy_(weights)


def _scaled(parts: Sequence[Part], step: Step, scratch: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the parts in float32, scaled; those that need neither are not copied."""
    scaled: list[torch.Tensor] = []
    for part in parts:
        gradient = step.gradients[part.name][part.start : part.start + part.length]
        if step.factors or gradient.dtype != torch.float32:
            room = scratch[part.position : part.position + part.length]
            factors = step.factors
            if factors and gradient.dtype == torch.float32:
                torch.mul(gradient, factors[0], out=room)
                factors = factors[1:]
            else:
                room.copy_(gradient)
            for factor in factors:
                room.mul_(factor)
            gradient = room
        scaled.append(gradient)
    return scaled
