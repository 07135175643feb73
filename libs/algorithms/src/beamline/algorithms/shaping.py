"""Rewards shaped by the length of the response."""


def overlong(reward: float, num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """The reward after DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4).

    With s = max_tokens - buffer_tokens: up to s tokens the reward is kept; from there to max_tokens it loses
    (num_tokens - s) / buffer_tokens x factor; a longer response earns 0.

    Args:
        num_tokens: length of the response.
        max_tokens: the longest response that still earns a reward.
        buffer_tokens: width of the punished interval, above 0 and below max_tokens.
        factor: what is lost at max_tokens.
    """
    if num_tokens > max_tokens:
        return 0.0
    excess = max(0, num_tokens - (max_tokens - buffer_tokens))
    return reward - excess / buffer_tokens * factor
