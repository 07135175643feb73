"""Parameters that are views of the trainer's shared memory: activating a policy then copies nothing.

A parameter can be one where its sources lie behind each other in the segment as they do in the parameter: q, k and v;
gate and up of one expert after the other. Modules of which any parameter cannot are loaded as usual.
"""

from collections.abc import Mapping

import torch
from torch import nn

from beamline.rollout.needs_recorder import Need, Target
from beamline.weights.manifest import Piece, ShmPlace, TensorEntry
from beamline.weights.staging import Staged

type _Source = tuple[str, Target]
"""A tensor's name, and where a box of it went."""


class SharedParameters:
    """Points the parameters of one model at policies.

    Args:
        model: its parameters are plain, those into which `needs` were recorded.
        needs: where each tensor went.
    """

    def __init__(self, model: nn.Module, needs: Mapping[str, Need]) -> None:
        self._model = model
        loaded = _targets_of(model, needs)
        self._sources = {
            name: targets for name, (parameter, targets) in loaded.items() if _is_whole(parameter, targets)
        }
        """Of each parameter that they make up completely."""
        self._names = {name: {tensor for tensor, _ in targets} for name, (_, targets) in loaded.items()}
        """Of the tensors that are loaded into each parameter."""
        self._staged: Staged | None = None

    def share(self, staged: Staged) -> set[str]:
        """Point parameters at a policy; returns the tensors that are to be loaded in the usual way.

        Parameters that those are loaded into have memory of their own.
        """
        found = {entry.name: (entry, [piece for piece, _ in parts]) for entry, parts in staged.pieces()}
        left: set[str] = set()
        for path, module in self._model.named_modules():
            parameters = {f"{path}.{name}": one for name, one in module.named_parameters(recurse=False)}
            own = {name: one for name, one in parameters.items() if name in self._names}
            views = [self._view(staged, found, name, parameter) for name, parameter in own.items()]
            is_shared = all(view is not None for view in views)
            for (name, parameter), view in zip(own.items(), views, strict=True):
                parameter.data = view if is_shared and view is not None else torch.empty_like(parameter.data)
                left |= set() if is_shared else self._names[name]
        return left

    def hold(self, staged: Staged) -> None:
        """A policy is served: keep its memory from being written, and no more that of the one before."""
        if self._staged is not None:
            self._staged.fence()
        self._staged = staged

    def _view(
        self, staged: Staged, found: Mapping[str, tuple[TensorEntry, list[Piece]]], name: str, parameter: torch.Tensor
    ) -> torch.Tensor | None:
        """A parameter's values as they lie in the segment; None where they do not."""
        begins = {_begin(*found[tensor], target) for tensor, target in self._sources.get(name, [])}
        begin = begins.pop() if len(begins) == 1 else None
        if begin is None or str(parameter.dtype) != f"torch.{found[self._sources[name][0][0]][0].dtype}":
            return None
        place, offset = begin
        attached = staged.attached[place]
        if attached is None or not isinstance(staged.manifest.places[place], ShmPlace):
            return None
        content = attached.content(offset, parameter.nbytes)
        return torch.frombuffer(content, dtype=parameter.dtype).view(parameter.shape)


def _targets_of(model: nn.Module, needs: Mapping[str, Need]) -> dict[str, tuple[torch.Tensor, list[_Source]]]:
    """Each parameter that was loaded, with what went into its memory, in order."""
    sources: dict[int, list[_Source]] = {}
    for name, need in needs.items():
        for target in need.targets:
            sources.setdefault(target.storage, []).append((name, target))
    return {
        name: (parameter, sorted(sources[storage], key=lambda source: source[1].offset_bytes))
        for name, parameter in model.named_parameters()
        if (storage := parameter.untyped_storage().data_ptr()) in sources
    }


def _is_whole(parameter: torch.Tensor, targets: list[_Source]) -> bool:
    """Whether contiguous targets follow each other from the parameter's first byte to its last."""
    end = 0
    for _, target in targets:
        if target.offset_bytes != end or not target.is_contiguous:
            return False
        end += target.num_bytes
    return parameter.is_contiguous() and end == parameter.nbytes == parameter.untyped_storage().nbytes()


def _begin(entry: TensorEntry, pieces: list[Piece], target: Target) -> tuple[int, int] | None:
    """Place and offset where the parameter would begin, of which a piece is what went to the target."""
    for piece in pieces:
        if piece.box == target.box and entry.num_bytes(piece) == target.num_bytes:
            return piece.place, piece.offset - target.offset_bytes
    return None
