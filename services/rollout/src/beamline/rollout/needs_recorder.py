"""What a rank keeps of each tensor, seen while it loads its own checkpoint.

A model's loading code cuts the tensors that it is given: half the rows on one rank of two, only some experts, nothing
of another stage's layers. So what it needs is not worked out from a layout but recorded: every tensor is handed over
as one that follows its views, and notes which box of it the code reads in the end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

from beamline.weights.tensors import Box


@dataclass(frozen=True)
class Target:
    """Memory into which a box of a tensor was copied."""

    box: Box
    storage: int
    """Address of the memory that it is part of."""
    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_contiguous: bool
    is_box: bool
    """Whether its elements are those of the box, in their order."""


@dataclass
class Need:
    """What is kept of one tensor."""

    boxes: list[Box] = field(default_factory=list[Box])
    dtype: str = ""
    """In which it is held, torch's name; empty where it was not copied straight into its place."""
    targets: list[Target] = field(default_factory=list[Target])
    num_reads: int = 0
    """As many as targets where all that was read was copied straight into its place."""


class NeedsRecorder:
    """Records what is read of named tensors."""

    def __init__(self) -> None:
        self.needs: dict[str, Need] = {}
        """Tensors of which nothing was read are missing."""

    def follow(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, each as one that is followed."""
        for name, tensor in tensors:
            yield name, _followed(tensor, _Source(self, name, tensor))

    def note(self, name: str, box: Box, target: torch.Tensor | None, *, is_box: bool = False) -> None:
        need = self.needs.setdefault(name, Need())
        need.num_reads += 1
        if box not in need.boxes:
            need.boxes.append(box)
        if target is not None:
            need.dtype = str(target.dtype).removeprefix("torch.")
            need.targets.append(
                Target(
                    box,
                    target.untyped_storage().data_ptr(),
                    int(target.storage_offset()) * target.itemsize,
                    target.nbytes,
                    tuple(target.shape),
                    tuple(target.stride()),
                    target.is_contiguous(),
                    is_box,
                )
            )


class _Source:
    """A tensor whose views are followed."""

    def __init__(self, recorder: NeedsRecorder, name: str, tensor: torch.Tensor) -> None:
        self._recorder = recorder
        self._name = name
        self._tensor = tensor

    def shares(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._tensor.untyped_storage().data_ptr()

    def note(self, view: torch.Tensor, target: torch.Tensor | None) -> None:
        box = box_of(self._tensor, view)
        is_box = target is not None and target.shape == view.shape and _is_in_order(self._tensor, box, view)
        self._recorder.note(self._name, box, target, is_box=is_box)


class FollowedTensor(torch.Tensor):
    """Stays followed through its views; whatever else is done with it counts as reading it."""

    _source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        followed = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, FollowedTensor)]
        plain_args, plain_kwargs = tree_map_only(FollowedTensor, _plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if _says_nothing_of_values(func, result):
            return result
        leaves, _ = tree_flatten(result)
        for tensor in followed:
            views = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and tensor._source.shares(leaf)]
            if views:
                result = tree_map_only(torch.Tensor, lambda leaf, of=tensor: _followed_if_shared(leaf, of), result)
            else:
                target = plain_args[0] if getattr(func, "__name__", "") == "copy_" else None
                tensor._source.note(_plain(tensor), target)
        return result


def box_of(base: torch.Tensor, view: torch.Tensor) -> Box:
    """The smallest box of a tensor that holds all elements of a view of it, or all of it where that is hard to say."""
    whole: Box = tuple((0, size) for size in base.shape)
    if not base.is_contiguous() or view.dtype != base.dtype or base.numel() == 0 or view.numel() == 0:
        return whole
    offset = view.storage_offset() - base.storage_offset()
    starts: list[int] = []
    for stride in base.stride():
        starts.append(offset // stride)
        offset %= stride
    ends = [start + 1 for start in starts]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        along = [dim for dim, step in enumerate(base.stride()) if base.shape[dim] > 1 and stride and stride % step == 0]
        if size > 1 and along:
            ends[along[0]] += (size - 1) * (stride // base.stride(along[0]))
        elif size > 1 and stride:
            return whole
    if any(end > size for end, size in zip(ends, base.shape, strict=True)):
        return whole
    return tuple(zip(starts, ends, strict=True))


def _is_in_order(base: torch.Tensor, box: Box, view: torch.Tensor) -> bool:
    """Whether a view has the elements of the box and no other order."""
    cut = base[tuple(slice(*edges) for edges in box)]
    steps = [[pair for pair in zip(one.shape, one.stride(), strict=True) if pair[0] > 1] for one in (cut, view)]
    same = steps[0] == steps[1] or (cut.is_contiguous() and view.is_contiguous())
    return same and cut.numel() == view.numel() and cut.data_ptr() == view.data_ptr() and cut.dtype == view.dtype


def _followed(tensor: torch.Tensor, source: _Source) -> FollowedTensor:
    followed = tensor.as_subclass(FollowedTensor)
    followed._source = source
    return followed


def _followed_if_shared(tensor: torch.Tensor, of: FollowedTensor) -> torch.Tensor:
    return _followed(tensor, of._source) if of._source.shares(tensor) else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


_METADATA = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "is_floating_point"}
    | {"is_complex", "element_size", "data_ptr", "untyped_storage", "get_device", "type", "__len__", "__hash__"}
)


def _says_nothing_of_values(func: Any, result: Any) -> bool:
    """Whether it is a question about shape, type or place."""
    name = getattr(func, "__name__", "")
    return not isinstance(result, torch.Tensor) and (name == "__get__" or name in _METADATA)
