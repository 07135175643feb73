"""The frozen reference: this rank's shard of the weights as they were when the policy was made."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Reference:
    """A copy of a module's parameters. Buffers are not copied: no update changes them."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._frozen = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module computes with the copy; afterwards it has its own weights again, whatever happened.

        Storage is swapped and nothing copied. No gradient may be pending, and none be taken inside.
        """
        own = [parameter.data for parameter in self._parameters]
        try:
            for parameter, frozen in zip(self._parameters, self._frozen, strict=True):
                parameter.data = frozen
            yield
        finally:
            for parameter, weight in zip(self._parameters, own, strict=True):
                parameter.data = weight
