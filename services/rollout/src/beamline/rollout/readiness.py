"""Whether a worker may take groups, and why not: a state machine without I/O that keeps the heartbeat's words true.

It may while three things are so: it serves the newest policy that it heard of, the canary of that policy agreed with
the trainer's, and its memory is not released.
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

    def serves(self, update: PolicyUpdate) -> bool:
        """Whether exactly these weights are served already."""
        return self._served is not None and self._served.manifest == update.manifest

    def hear_of(self, update: PolicyUpdate) -> None:
        """A newer policy exists: take no groups until it is served."""
        self._newest = update
        self._tell()

    def judge(self, update: PolicyUpdate, canary_gap: float) -> str:
        """Serve the policy that was loaded if its canary agreed; else serve none, and return why."""
        self.canary_gap = canary_gap
        agreed = canary_gap <= self._canary_tolerance
        self._served = update if agreed else None
        self._tell()
        if agreed:
            return ""
        return (
            f"policy {update.policy_version} is not served: a log-probability of the canary differs from the trainer's "
            f"by {canary_gap:.2e}, rollout.canary_tolerance is {self._canary_tolerance:.2e}"
        )

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
        if self.policy_version != self._newest.policy_version:
            return f"policy {self._newest.policy_version} to be loaded"
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
