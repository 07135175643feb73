"""What a directory's safetensors files hold, by their headers: no tensor is read."""

import math
from pathlib import Path

from safetensors import safe_open


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor; none where there is no such file.

    Raises SafetensorError for a file that is not one.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    return shapes


def num_elements(directory: Path) -> int:
    """Of all tensors of the directory's weights. Raises as `tensor_shapes` does."""
    return sum(math.prod(shape) for shape in tensor_shapes(directory).values())
