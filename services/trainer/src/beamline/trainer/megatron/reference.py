"""The frozen reference: the model as it was when the policy was made, whichever way it is kept."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class CopiedWeights:
    """Implements `Reference` by a copy of a module's parameters. Buffers are not copied: no update changes them."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._frozen = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Storage is swapped and nothing copied."""
        own = [parameter.data for parameter in self._parameters]
        try:
            for parameter, frozen in zip(self._parameters, self._frozen, strict=True):
                parameter.data = frozen
            yield
        finally:
            for parameter, weight in zip(self._parameters, own, strict=True):
                parameter.data = weight
