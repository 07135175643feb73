"""The learning rate over a run."""

import math


def learning_rate(step: int, *, peak: float, warmup_steps: int, num_steps: int, decay: str, min_ratio: float) -> float:
    """Of train step `step`, counted from 1: linear warm-up to `peak`, then constant, linear or cosine.

    The decay runs from the end of the warm-up to `num_steps`, where it reaches min_ratio * peak, and stays there.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if decay == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    share = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * share)
