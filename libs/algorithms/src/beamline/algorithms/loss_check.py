"""What a loss of a user's own returns, looked at before it is summed."""

from collections.abc import Callable

from torch import Tensor

from beamline.algorithms.losses import Clip, Surrogate, TokenLoss


class LossError(ValueError):
    """A loss that nothing can be trained with."""


def checked_loss(name: str, surrogate: Callable[..., object]) -> Surrogate:
    """The same loss, refusing answers that cannot be used.

    Args:
        name: of the setting's value, for messages.

    Raises:
        LossError: on a call whose function raised, or whose answer is no TokenLoss of one entry a token, or whose loss
            is NaN or infinite where log-probabilities and advantages are numbers.
    """

    def checked(
        logprobs_L: Tensor,
        old_logprobs_L: Tensor,
        advantages_L: Tensor,
        sequence_L: Tensor,
        num_sequences: int,
        clip: Clip,
    ) -> TokenLoss:
        try:
            found = surrogate(logprobs_L, old_logprobs_L, advantages_L, sequence_L, num_sequences, clip)
        except Exception as error:  # a function of the user's own may raise anything
            raise LossError(f"algorithm.loss={name} raised {type(error).__name__}: {error}") from error
        if not isinstance(found, TokenLoss):
            raise LossError(f"algorithm.loss={name} returned a {type(found).__name__}, expected a TokenLoss")
        for part in ("loss_L", "ratio_L", "clipped_L"):
            column: object = getattr(found, part)
            shape = tuple(column.shape) if isinstance(column, Tensor) else f"a {type(column).__name__}"
            if shape != tuple(logprobs_L.shape):
                raise LossError(
                    f"algorithm.loss={name}: {part} is {shape}, expected a tensor of one entry a token, "
                    f"{tuple(logprobs_L.shape)}"
                )
        num_bad = int((~found.loss_L.isfinite()).sum())
        if num_bad and logprobs_L.isfinite().all() and advantages_L.isfinite().all():
            raise LossError(
                f"algorithm.loss={name}: loss_L is NaN or infinite at {num_bad} of {len(logprobs_L)} tokens, whose "
                "log-probabilities and advantages are finite numbers"
            )
        return found

    return checked
