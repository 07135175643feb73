"""The processes of an engine's ranks, as this one talks to them: a call goes to all, and every rank answers."""

import asyncio
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from beamline.protocol.errors import WeightError
from beamline.rollout.engine import EngineError

_FIRST_WAIT_S = 0.02
"""Before the first question whether a policy has been fetched: a small one has."""
_LONGEST_WAIT_S = 0.5
"""Between two questions whether a large one is."""


class Ranks:
    """All ranks of one engine.

    Args:
        llm: their engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of EngineWorker in every rank's process, between two steps. Raises EngineError."""
        try:
            return await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise EngineError(f"vLLM failed in {method}: {error}") from error

    async def stage(self, *args: Any) -> int:
        """Have every rank fetch its part of a policy, by `beamline_stage`; returns the bytes of all.

        Raises:
            WeightError: in the words of the first rank that could not. Others may have fetched theirs.
        """
        answers = await self.call("beamline_stage", *args)
        wait_s = _FIRST_WAIT_S
        while None in answers:
            # Samples go on meanwhile: an answer that is waited for in the engine core's loop would hold them up.
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            answers = await self.call("beamline_staged")
        if errors := [answer for answer in answers if isinstance(answer, str)]:
            raise WeightError(errors[0])
        return sum(answers)
