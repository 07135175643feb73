"""Whether a worker may take groups, and why not: a state machine without I/O that keeps the heartbeat's words true.

It may from its first policy on, except between the fence of a newer one and the moment when that is served, and while
its memory is released. A worker that cannot serve the fence's policy waits for the next.
"""

import asyncio
from collections.abc import Collection

from beamline.protocol.messages import PolicyUpdate, WorkerState
from beamline.runtime.service import WorkerStatus


class Readiness:
    """What one worker serves.

    Args:
        status: what the heartbeat tells.
    """

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._served: PolicyUpdate | None = None
        self._newest = -1
        self._due = -1
        """Of the open fence: this policy, or a newer one, must be served."""
        self._failure = ""
        """Why the policy that is due will not be served."""
        self._released = False
        self._open = asyncio.Event()
        self._on_trial = -1
        self._judged = asyncio.Event()
        self._refusals: list[int] = []
        self._tell()

    @property
    def policy_version(self) -> int:
        """The policy that is served; -1 for none that is trusted."""
        return self._served.policy_version if self._served else -1

    @property
    def served(self) -> PolicyUpdate | None:
        """The update whose policy is served."""
        return self._served

    async def when_open(self) -> None:
        """Returns at once while groups may be taken."""
        await self._open.wait()

    def hear_of(self, policy_version: int) -> None:
        """A policy is there to be prepared. The one before is served meanwhile."""
        self._newest = policy_version
        self._tell()

    def close_for(self, policy_version: int) -> None:
        """Its fence is open: take no groups until it is served. A policy older than the one that is served is past."""
        if policy_version >= self.policy_version:
            self._due, self._failure = policy_version, ""
            self._tell()

    def give_up(self, policy_version: int, why: str) -> None:
        """The policy will not be served, unless its fence opens once more."""
        if policy_version == self._due:
            self._failure = why
            self._tell()

    def try_out(self, policy_version: int) -> None:
        """The engine samples from a policy that nobody has checked yet."""
        self._on_trial = policy_version
        self._judged.clear()

    def serve(self, update: PolicyUpdate) -> None:
        """The policy was checked, and is served from here on."""
        self._served = update
        self._end_trial()

    def refuse(self, policy_version: int) -> None:
        """The policy was checked and found wrong: what was sampled from it meanwhile is void."""
        self._refusals.append(policy_version)
        self._end_trial()

    def serve_none(self) -> None:
        """The engine holds no policy that can be trusted."""
        self._served = None
        self._tell()

    def begin_group(self) -> int:
        """A group is sampled from here on; returns what `are_void` asks for at its end."""
        self._status.in_flight += 1
        self._tell()
        return len(self._refusals)

    def end_group(self) -> None:
        """Its samples have ended."""
        self._status.in_flight -= 1
        self._tell()

    async def are_void(self, policy_versions: Collection[int], begun: int) -> bool:
        """Whether tokens sampled from these policies since a group had begun came from one that was refused."""
        if self._on_trial in policy_versions:
            await self._judged.wait()
        return not set(policy_versions).isdisjoint(self._refusals[begun:])

    def release(self) -> None:
        """Memory is given back."""
        self._released = True
        self._tell()

    def restore(self) -> None:
        """Memory is there again."""
        self._released = False
        self._tell()

    def waiting_for(self) -> str:
        """What keeps the worker from taking groups, in words; empty when nothing does."""
        return self._wait()[0]

    def _wait(self) -> tuple[str, tuple[str, ...]]:
        """As `waiting_for`, and who has to act: nobody else where the worker itself is at it."""
        if self._served is None and self._newest < 0:
            return "the trainer's first policy", ("trainer",)
        if self._due > self.policy_version:
            return self._wait_of_due()
        if self._served is None:
            return f"the fence of policy {self._newest}", ("coordinator",)
        return ("its phase", ("coordinator",)) if self._released else ("", ())

    def _wait_of_due(self) -> tuple[str, tuple[str, ...]]:
        if self._newest > self._due:
            return f"the fence of policy {self._newest}", ("coordinator",)
        if self._failure:
            return f"a policy after {self._due}: {self._failure}", ("trainer",)
        return f"policy {self._due} to be activated", ()

    def _end_trial(self) -> None:
        self._on_trial = -1
        self._judged.set()
        self._tell()

    def _tell(self) -> None:
        status, (waiting_for, on) = self._status, self._wait()
        status.policy_version = self.policy_version
        status.wait_for(waiting_for, on)
        if waiting_for:
            self._open.clear()
            status.state = WorkerState.PAUSED
        else:
            self._open.set()
            status.state = WorkerState.BUSY if status.in_flight else WorkerState.READY
