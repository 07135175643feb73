"""Whether a worker may take groups, and why not: a state machine without I/O that keeps the heartbeat's words true.

It may while it serves the newest policy that it heard of, or the one before where the newest was refused, and while
its memory is not released. A policy is refused when its weights cannot be loaded or its canary disagrees with the
trainer's.
"""

import asyncio

from beamline.protocol.messages import PolicyUpdate, WorkerState
from beamline.runtime.service import WorkerStatus


class Readiness:
    """What one worker serves.

    Args:
        status: what the heartbeat tells.
        canary_tolerance: largest |engine - trainer| log-probability of a policy that is served.
    """

    def __init__(self, status: WorkerStatus, canary_tolerance: float) -> None:
        self._status = status
        self._canary_tolerance = canary_tolerance
        self._newest: PolicyUpdate | None = None
        self._served: PolicyUpdate | None = None
        self._refused: set[int] = set()
        self._released = False
        self._open = asyncio.Event()
        self.canary_gap = 0.0
        """Of the policy that was loaded last."""
        self._tell()

    @property
    def policy_version(self) -> int:
        """The policy that is served; -1 for none that is trusted."""
        return self._served.policy_version if self._served else -1

    async def when_open(self) -> None:
        """Returns at once while groups may be taken."""
        await self._open.wait()

    @property
    def served(self) -> PolicyUpdate | None:
        """The update whose policy is served."""
        return self._served

    def serves(self, update: PolicyUpdate) -> bool:
        """Whether exactly these weights are served already."""
        return self._served is not None and self._served.manifest == update.manifest

    def hear_of(self, update: PolicyUpdate) -> None:
        """A newer policy exists: take no groups until it is served."""
        self._newest = update
        self._tell()

    def judge(self, update: PolicyUpdate, canary_gap: float) -> str:
        """Why the policy that was loaded must not be served; empty where its canary agreed."""
        if canary_gap <= self._canary_tolerance:
            return ""
        return (
            f"policy {update.policy_version} is refused: a log-probability of the canary differs from the trainer's "
            f"by {canary_gap:.2e}, rollout.canary_tolerance is {self._canary_tolerance:.2e}"
        )

    def serve(self, update: PolicyUpdate, canary_gap: float) -> None:
        """The policy that was loaded is served from here on."""
        self._served, self.canary_gap = update, canary_gap
        self._refused.discard(update.policy_version)
        self._tell()

    def refuse(self, update: PolicyUpdate, canary_gap: float | None = None) -> None:
        """The policy is not served, whatever was sampled from it meanwhile is void, and the one before stays."""
        self._refused.add(update.policy_version)
        if canary_gap is not None:
            self.canary_gap = canary_gap
        self._tell()

    def serve_none(self) -> None:
        """The engine holds no policy that can be trusted."""
        self._served = None
        self._tell()

    def was_refused(self, policy_version: int) -> bool:
        """Whether that policy was loaded and found wrong."""
        return policy_version in self._refused

    def release(self) -> None:
        """Memory is given back."""
        self._released = True
        self._tell()

    def restore(self) -> None:
        """Memory is there again."""
        self._released = False
        self._tell()

    def count(self, change: int) -> None:
        """Groups begun or ended."""
        self._status.in_flight += change
        self._tell()

    def waiting_for(self) -> str:
        """What keeps the worker from taking groups, in words; empty when nothing does."""
        if self._newest is None:
            return "the trainer's first policy"
        newest = self._newest.policy_version
        if newest in self._refused:
            return f"a policy after {newest}, which was refused"
        if self.policy_version != newest:
            return f"policy {newest} to be loaded"
        return "its phase" if self._released else ""

    def _tell(self) -> None:
        status, waiting_for = self._status, self.waiting_for()
        status.policy_version, status.waiting_for = self.policy_version, waiting_for
        if waiting_for:
            self._open.clear()
            status.state = WorkerState.PAUSED
        else:
            self._open.set()
            status.state = WorkerState.BUSY if status.in_flight else WorkerState.READY
