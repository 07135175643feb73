"""Tensors in runs of a limited size, for what is moved a run at a time."""

from collections.abc import Iterator, Mapping

from torch import Tensor


def buckets_of(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Names, in order, of at most `max_bytes` as float32; a larger tensor is alone."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        num_bytes = 4 * tensor.numel()
        if names and size + num_bytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield names
