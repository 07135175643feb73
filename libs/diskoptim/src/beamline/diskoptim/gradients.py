"""Gradients before the first bucket: all there, of the right shape, finite; their norm."""

from collections.abc import Mapping

import torch

from beamline.diskoptim.errors import GradientError

CONVERTED_AT_ONCE = 2**18
"""Elements."""


def flat_gradients(
    parameters: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """A flat view of each parameter's gradient: the given one, else `.grad`.

    One that is not contiguous is copied. Raises GradientError for one that is missing, of another shape or elsewhere.
    """
    flat: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad if given is None else given.get(name)
        if gradient is None:
            raise GradientError(f"parameter {name!r} has no gradient: leave it out of params, or give it zeros")
        if gradient.shape != parameter.shape or gradient.device != parameter.device:
            raise GradientError(
                f"the gradient of {name!r} is {list(gradient.shape)} on {gradient.device}, and the parameter "
                f"{list(parameter.shape)} on {parameter.device}"
            )
        flat[name] = gradient.detach().reshape(-1)
    return flat


def total_norm(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all gradients, in float32: of float32 gradients what torch.nn.utils.get_total_norm says.

    Others are taken in float32 by pieces, since torch would make a copy of the whole. Raises GradientError naming the
    first gradient that is not finite.
    """
    norms = [_norm(gradient) for gradient in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if not torch.isfinite(norm):
        _refuse(gradients)
        raise GradientError(f"the gradients are finite, and their norm is {norm.item()}: the loss is far too large")
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """As torch.nn.utils.clip_grads_with_norm_: at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dtype == torch.float32 or gradient.numel() <= CONVERTED_AT_ONCE:
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)
    pieces = gradient.split(CONVERTED_AT_ONCE)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces])
    )


def _refuse(gradients: Mapping[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        wrong = torch.nonzero(~torch.isfinite(gradient)).flatten()
        if len(wrong):
            raise GradientError(
                f"the gradient of {name!r} is not finite: {len(wrong)} of {gradient.numel()} elements, the first at "
                f"{wrong[0].item()} is {gradient[wrong[0]].item()}; nothing was updated: skip this step"
            )
