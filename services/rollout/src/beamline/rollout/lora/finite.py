"""Refuses values that are no numbers, before anything computes with them."""

import numpy as np
import torch

from beamline.protocol.errors import WeightError
from beamline.rollout.rank_weights import tensor_of
from beamline.weights.staging import Staged
from beamline.weights.transport import Content, DeviceBytes

_BFLOAT16_EXPONENT = 0x7F80
"""All ones in infinity and in what is no number."""


def check_finite(staged: Staged) -> None:
    """Raises WeightError naming the first tensor, and where in it, that has infinity or what is no number."""
    for entry, pieces in staged.pieces():
        for piece, content in pieces:
            if is_finite(content, entry.dtype):
                continue
            wrong = ~torch.isfinite(tensor_of(content, entry.dtype, piece.shape).float())
            inside = wrong.nonzero()[0].tolist()
            position = [start + index for start, index in zip(piece.start, inside, strict=True)]
            raise WeightError(
                f"policy {staged.manifest.policy_version}: tensor {entry.name} is not finite at {position}, nor in "
                f"{int(wrong.sum()) - 1} places more: its training has diverged, and it is not served"
            )


def is_finite(content: Content, dtype: str) -> bool:
    """Of bytes with values of a floating-point type.

    There are thousands of tensors, and the thread that samples waits for this one's every line: in main memory it is
    left to numpy, which takes an eighth of torch's time for a small one.
    """
    if isinstance(content, DeviceBytes) or dtype.startswith("float8"):
        return bool(torch.isfinite(tensor_of(content, dtype, [-1]).float()).all())
    if dtype == "bfloat16":  # not one of numpy's either
        return bool(((np.frombuffer(content, np.uint16) & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(np.frombuffer(content, dtype)).all())
