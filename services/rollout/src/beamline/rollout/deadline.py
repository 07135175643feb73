"""Sampling that ends in time.

The coordinator fails a group that is not graded by its deadline. So sampling ends some time before it: what still runs
then is aborted, and goes out with the tokens that it has beside the samples that ended, which can be graded.
"""

import asyncio
import time

from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine import Completion, Sampler


async def sample(sampler: Sampler, group: PromptGroup, answer_s: float) -> list[Completion]:
    """One completion a seed, aborted where it still ran `answer_s` seconds before the group's deadline.

    Raises:
        TimeoutError: no sample had ended by then, or the sampler did not hand them out before the deadline itself.
        Rejected: as `Sampler.generate`.
    """
    left_s = group.deadline - time.time()
    if left_s <= answer_s:
        raise TimeoutError
    stop = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(left_s - answer_s, stop.set)
    try:
        async with asyncio.timeout(left_s):
            completions = await sampler.generate(group, stop)
    finally:
        timer.cancel()
    if all(completion.finish_reason is FinishReason.ABORT for completion in completions):
        raise TimeoutError
    return completions
