"""A worker's side of the fence: PolicyUpdate -> PolicyPrepared, then Fence -> PolicyLoaded.

Updates and fences arrive on two loops, in any order and more than once. Each of them says what is to be so by now;
`_catch_up` does what of it is still missing, one thing at a time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from opentelemetry import context

from beamline.protocol.messages import Fence, Message, PolicyLoaded, PolicyPrepared, PolicyUpdate
from beamline.rollout.activation import FAILURES, Activated, Activation
from beamline.rollout.readiness import Readiness
from beamline.runtime.trace_context import within


@dataclass(slots=True)
class Candidate:
    """The newest policy that was offered, and how far it has come."""

    update: PolicyUpdate
    attempt: int = 0
    """Of the last try with it; 0 before the first."""
    error: str = ""
    """Why it is neither prepared nor served."""
    num_bytes: int = 0
    prepare_s: float = 0.0
    loaded: PolicyLoaded | None = None
    """What was said once it was served."""

    @property
    def version(self) -> int:
        return self.update.policy_version


class PolicySync:
    """Follows PolicyUpdate and Fence, and says how it goes.

    Args:
        worker: this worker's name.
        incarnation: changes with every start of the process.
        publish: sends the answers.
        readiness: closes with the fence, and opens once its policy is served.
        activation: the work on the engine.
    """

    def __init__(
        self,
        *,
        worker: str,
        incarnation: str,
        publish: Callable[[Message], Awaitable[None]],
        readiness: Readiness,
        activation: Activation,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._publish = publish
        self._readiness = readiness
        self._activation = activation
        self._working = asyncio.Lock()
        self._heard: PolicyUpdate | None = None
        self._offered: PolicyUpdate | None = None
        """The last one that was looked at, whatever became of it."""
        self._candidate: Candidate | None = None
        self._stale: dict[int, str] = {}
        """Versions that were refused without being tried, and why."""
        self._fence: Fence | None = None
        self._trace_of_fence = context.get_current()
        self._followed: Fence | None = None
        """The last one that was answered."""

    async def on_update(self, update: PolicyUpdate) -> None:
        """Prepare a new policy while the old one is served. Raises EngineError."""
        self._heard = update
        await self._catch_up()

    async def on_fence(self, fence: Fence) -> None:
        """Prepare a policy once more, or activate it. From an open fence on no groups are taken. Raises EngineError."""
        if fence == self._fence:
            return
        self._fence, self._trace_of_fence = fence, context.get_current()
        if fence.is_open:
            self._readiness.close_for(fence.policy_version)
        await self._catch_up()

    async def _catch_up(self) -> None:
        async with self._working:
            update = self._heard
            if update is not None and not self._is_repeat(update):
                self._offered = update
                await self._consider(update)
            fence = self._fence
            if fence is not None and fence != self._followed and self._knows(fence.policy_version):
                self._followed = fence
                with within(self._trace_of_fence):
                    await self._follow(fence)

    async def _consider(self, update: PolicyUpdate) -> None:
        """Make a newer policy the candidate; recognise or refuse any other."""
        version = update.policy_version
        attempt = self._fence.attempt if self._fence and self._fence.policy_version == version else 1
        if version > self._readiness.policy_version:
            self._readiness.hear_of(version)
            self._candidate, self._stale = Candidate(update), {}
            await self._prepare(self._candidate, attempt)
            return
        try:
            await self._activation.recognise(update)
        except FAILURES as refused:
            self._stale[version] = str(refused)
        await self._publish(self._prepared(version, attempt, self._stale.get(version, "")))

    def _is_repeat(self, update: PolicyUpdate) -> bool:
        known = (self._offered, self._candidate and self._candidate.update)
        offer = (update.policy_version, update.manifest)
        return any(one is not None and (one.policy_version, one.manifest) == offer for one in known)

    def _knows(self, version: int) -> bool:
        """Whether anything can be said of a policy yet; otherwise its update is on the way."""
        return version in self._stale or (self._candidate is not None and version <= self._candidate.version)

    async def _follow(self, fence: Fence) -> None:
        candidate, version = self._candidate, fence.policy_version
        if candidate is None or version != candidate.version or version in self._stale:
            await self._answer_for_another(fence)
            return
        if fence.attempt > candidate.attempt and candidate.error:
            await self._prepare(candidate, fence.attempt)
        elif fence.attempt > candidate.attempt and not fence.is_open:
            await self._publish(self._preparation(candidate, fence.attempt))
        candidate.attempt = max(candidate.attempt, fence.attempt)
        if fence.is_open:
            await self._activate(candidate, fence.attempt)

    async def _answer_for_another(self, fence: Fence) -> None:
        """Say at once what becomes of a policy that is not the candidate, so that nobody waits for it."""
        version = fence.policy_version
        error = self._stale.get(version, "")
        if not error and version != self._readiness.policy_version:
            newer = self._candidate.version if self._candidate else version
            error = f"policy {version} was not prepared: this worker has heard of policy {newer} instead"
        if fence.is_open:
            self._readiness.give_up(version, error)
            await self._publish(self._loaded(version, fence.attempt, 0.0, Activated(0.0, error)))
        else:
            await self._publish(self._prepared(version, fence.attempt, error))

    async def _prepare(self, candidate: Candidate, attempt: int) -> None:
        started = time.monotonic()
        candidate.attempt, candidate.error = attempt, ""
        try:
            candidate.num_bytes = await self._activation.prepare(candidate.update)
        except FAILURES as failure:
            candidate.error = str(failure)
        candidate.prepare_s = time.monotonic() - started
        await self._publish(self._preparation(candidate, attempt))

    async def _activate(self, candidate: Candidate, attempt: int) -> None:
        """Serve the candidate, unless it is served already or was not prepared."""
        if candidate.loaded is not None:
            await self._publish(msgspec.structs.replace(candidate.loaded, attempt=attempt))
            return
        started = time.monotonic()
        if candidate.error:
            activated = Activated(0.0, f"not prepared: {candidate.error}")
        else:
            activated = await self._activation.activate(candidate.update)
            candidate.error = activated.error
        loaded = self._loaded(candidate.version, attempt, time.monotonic() - started, activated)
        if loaded.error:
            self._readiness.give_up(candidate.version, loaded.error)
        else:
            candidate.loaded = loaded
        await self._publish(loaded)

    def _preparation(self, candidate: Candidate, attempt: int) -> PolicyPrepared:
        return self._prepared(candidate.version, attempt, candidate.error, candidate.num_bytes, candidate.prepare_s)

    def _prepared(
        self, version: int, attempt: int, error: str, num_bytes: int = 0, prepare_s: float = 0.0
    ) -> PolicyPrepared:
        return PolicyPrepared(
            worker=self._worker,
            incarnation=self._incarnation,
            policy_version=version,
            attempt=attempt,
            num_bytes=num_bytes,
            prepare_s=prepare_s,
            error=error,
        )

    def _loaded(self, version: int, attempt: int, load_s: float, activated: Activated) -> PolicyLoaded:
        return PolicyLoaded(
            worker=self._worker,
            incarnation=self._incarnation,
            policy_version=version,
            attempt=attempt,
            load_s=load_s,
            canary_gap=activated.canary_gap,
            error=activated.error,
        )
