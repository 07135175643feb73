"""Sampling that ends in time, and what may cut it short.

The coordinator fails a group that is not graded by its deadline. So sampling ends some time before it: what still runs
then is aborted, and goes out with the tokens that it has beside the samples that ended, which can be graded.
"""

import asyncio
import time

from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine import Completion, Sampler
from beamline.runtime.waits import waiting


class CutShort(Exception):
    """The group cannot be graded as it is, and may be sampled anew. `kind` is a short machine-readable word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


async def sample(sampler: Sampler, group: PromptGroup, answer_s: float) -> list[Completion]:
    """One completion a seed, aborted where it still ran `answer_s` seconds before the group's deadline.

    Raises:
        CutShort: kind "deadline": no sample had ended by then, or the sampler did not hand them out before the deadline
            itself. Kind "policy_update": the engine aborted samples because a new policy was activated.
        Rejected: as `Sampler.generate`.
    """
    left_s = group.deadline - time.time()
    if left_s <= answer_s:
        raise _late()
    stop = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(left_s - answer_s, stop.set)
    try:
        what = f"the engine to sample {len(group.seeds)} responses of group {group.group_id}"
        with waiting(what, within_s=left_s):
            async with asyncio.timeout(left_s):
                completions = await sampler.generate(group, stop)
    except TimeoutError:
        raise _late() from None
    finally:
        timer.cancel()
    aborted = [completion.finish_reason is FinishReason.ABORT for completion in completions]
    if any(aborted) and not stop.is_set():
        text = f"a new policy cut off {sum(aborted)} of its {len(aborted)} samples (weights.aborted=drop)"
        raise CutShort("policy_update", text)
    if all(aborted):
        raise _late()
    return completions


def _late() -> CutShort:
    return CutShort("deadline", "its deadline came before any of its samples ended")
