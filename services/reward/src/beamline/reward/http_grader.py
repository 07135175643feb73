"""The grader `http`: an endpoint of the user's own says the reward.

It is sent `{"response": ..., "ground_truth": ...}` by POST and answers status 200 with
`{"reward": 1.0, "acc": 1.0, "pred": "42", "why": "..."}`, of which only the reward has to be there. Without `acc` a
reward over 0 counts as right. No answer, any other status, and what is not such an answer is an abstention.
"""

import asyncio

import httpx2
import msgspec

from beamline.protocol.reward_config import HttpSection
from beamline.reward.grader import Grader, Verdict

_TOO_MANY_REQUESTS, _FIRST_SERVER_ERROR = 429, 500


class EndpointError(Exception):
    """The endpoint gave no reward; says what it gave."""


class _Busy(EndpointError):
    """Worth another try."""


class _Answer(msgspec.Struct, frozen=True):
    reward: float
    acc: float | None = None
    pred: str = ""
    why: str = ""


def make_grader(settings: HttpSection) -> Grader:
    """A grader that asks this endpoint."""
    return HttpGrader(settings).grade


class HttpGrader:
    """Asks an endpoint, over one connection that is kept."""

    def __init__(self, settings: HttpSection) -> None:
        self._settings = settings
        self._runner: asyncio.Runner | None = None
        self._client: httpx2.AsyncClient

    def grade(self, text: str, ground_truth: str) -> Verdict:
        """The endpoint's verdict. Raises EndpointError."""
        if self._runner is None:  # not before: a connection belongs to one process
            self._runner = asyncio.Runner()
            # What the environment says of proxies is not part of the run's configuration.
            self._client = httpx2.AsyncClient(timeout=self._settings.timeout_s, trust_env=False)
        question = msgspec.json.encode({"response": text, "ground_truth": ground_truth})
        return self._runner.run(self._ask_in_time(question))

    async def _ask_in_time(self, question: bytes) -> Verdict:
        deadline_s = self._settings.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._ask_until_answered(question)
        except TimeoutError:
            raise EndpointError(f"{self._settings.url} gave no reward within {deadline_s:g} s") from None

    async def _ask_until_answered(self, question: bytes) -> Verdict:
        for attempt in range(self._settings.retries):
            try:
                return await self._ask(question)
            except _Busy:
                await asyncio.sleep(self._settings.backoff_s * 2**attempt)
        return await self._ask(question)

    async def _ask(self, question: bytes) -> Verdict:
        url, headers = self._settings.url, {"Content-Type": "application/json"}
        try:
            response = await self._client.post(url, content=question, headers=headers)
        except httpx2.TransportError as error:
            raise _Busy(f"{url} gave no answer: {type(error).__name__} {error}") from error
        status = response.status_code
        if status == _TOO_MANY_REQUESTS or status >= _FIRST_SERVER_ERROR:
            raise _Busy(f"{url} answered with status {status}")
        if status != httpx2.codes.OK:
            raise EndpointError(f"{url} answered with status {status}")
        try:
            answer = msgspec.json.decode(response.content, type=_Answer)
            acc = float(answer.reward > 0) if answer.acc is None else answer.acc
            return Verdict(reward=answer.reward, acc=acc, pred=answer.pred, why=answer.why)
        except ValueError as error:
            raise EndpointError(f"{url} answered {response.text[:40]!r}: {error}") from error
