"""Watches how large the tensors are that torch makes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave back, those of a backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0
        self.operation = ""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.num_elements:
                self.num_elements, self.operation = tensor.numel(), str(func)
        return found
