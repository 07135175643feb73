"""A policy into the engine: fetched beside the one that is served, activated, checked by its canary, or put back."""

import math
from contextlib import AbstractAsyncContextManager
from statistics import median
from typing import NamedTuple

from opentelemetry import trace

from beamline.protocol.errors import BlobError, DeadlineExceeded, WeightError
from beamline.protocol.messages import PolicyUpdate
from beamline.protocol.weights_config import WeightsSection
from beamline.rollout.engine import Engine, Pause
from beamline.rollout.readiness import Readiness
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.deadline import deadline
from beamline.weights.manifest import WeightManifest

tracer = trace.get_tracer(__name__)

SLOT_SHARE = 0.5
"""Of the time that a policy has to be prepared: for requests to leave a slot for its adapters."""

FAILURES = (WeightError, BlobError, DeadlineExceeded)
"""What keeps a policy from being served. Anything else ends the process."""


class Activated(NamedTuple):
    """How it went: served where there is no error."""

    canary_gap: float
    error: str = ""


class Activation:
    """Changes what the engine has, and tells `readiness` what is served. One call at a time.

    Args:
        engine: samples from one policy at a time.
        blobs: where manifests come from.
        readiness: hears of trials and verdicts.
        pause: what becomes of samples under way.
        deadline_s: how long a policy may take to be prepared, and again to be activated.
        canary_tolerance: largest |engine - trainer| log-probability of a policy that is served.
        exact: whether every log-probability of the canary must agree, as in float32. In a lower precision the median
            counts: where a router's scores nearly tie, engine and trainer send a token to other experts, and single
            log-probabilities differ by whole units.
        canary_first: whether the engine can score a staged policy, as it can adapters: then none is served before its
            canary agrees.
    """

    def __init__(
        self,
        engine: Engine,
        blobs: BlobStore,
        readiness: Readiness,
        *,
        pause: Pause,
        deadline_s: float,
        canary_tolerance: float,
        exact: bool,
        canary_first: bool,
    ) -> None:
        self._engine = engine
        self._blobs = blobs
        self._readiness = readiness
        self._pause: Pause = pause
        self._deadline_s = deadline_s
        self._canary_tolerance = canary_tolerance
        self._gap_of = max if exact else median
        self._canary_first = canary_first
        self._staged: WeightManifest | None = None
        self._served: WeightManifest | None = None

    @tracer.start_as_current_span("transfer")
    async def prepare(self, update: PolicyUpdate) -> int:
        """Have the engine fetch a policy beside the one that is served; returns the bytes.

        Raises:
            WeightError, BlobError, DeadlineExceeded: nothing is prepared, and what is served is not touched.
        """
        version = update.policy_version
        async with self._within(f"the weights of policy {version} to be fetched and verified"):
            if self._staged is not None:
                self._staged = None
                await self._engine.drop_staged()
            return await self._stage(await self._manifest_of(update), SLOT_SHARE * self._deadline_s)

    async def recognise(self, update: PolicyUpdate) -> None:
        """Accept a policy that is not newer than the served one if it is that one; nothing is loaded.

        Raises:
            WeightError: it is stale, or has other weights under the served one's version. Also BlobError,
                DeadlineExceeded.
        """
        assert self._readiness.served is not None and self._served is not None, "none is served"
        version, served = update.policy_version, self._readiness.policy_version
        if version < served:
            raise WeightError(f"policy {version} is stale: policy {served} is served")
        async with self._within(f"the manifest of policy {version}"):
            manifest = await self._manifest_of(update)
        if manifest.contents != self._served.contents:
            raise WeightError(f"policy {version} is served with other weights: a new policy needs a new version")
        self._served = manifest  # its owner may have been started anew: the way back leads there from now on

    @tracer.start_as_current_span("activate")
    async def activate(self, update: PolicyUpdate) -> Activated:
        """Serve the prepared policy if its canary agrees, else the old one again."""
        manifest = self._staged
        assert manifest is not None, "nothing is prepared"
        activated = await self._try_out(update, self._pause)
        if activated.error:
            return activated._replace(error=f"{activated.error}; {await self._put_back()}")
        self._served = manifest
        self._readiness.serve(update)
        return activated

    async def _put_back(self) -> str:
        """Serve the policy before, whose weights its transport keeps, or a slot for adapters; says how it went."""
        before, manifest = self._readiness.served, self._served
        if before is None or manifest is None:
            return "no policy is served before it"
        try:
            async with self._within(f"the weights of policy {before.policy_version} to be fetched once more"):
                await self._stage(manifest, 0.0)
            error = (await self._try_out(before, "overlap" if self._pause == "overlap" else "keep")).error
        except FAILURES as gone:
            error = str(gone)
        if error:
            self._readiness.serve_none()
            self._served = None
            return f"policy {before.policy_version} cannot be put back, so that none is served: {error}"
        self._readiness.serve(before)
        return f"policy {before.policy_version} is served on"

    async def _try_out(self, update: PolicyUpdate, pause: Pause) -> Activated:
        """Activate what is prepared and check it, before or after; where that fails, what was sampled of it is void."""
        version, gap = update.policy_version, math.inf
        self._staged = None
        self._readiness.try_out(version)
        try:
            async with self._within(f"policy {version} to be activated (weights.pause: {pause})"):
                if not self._canary_first:
                    await self._engine.activate_weights(pause)
                gap = await self._canary_gap(update)
                if self._canary_first and gap <= self._canary_tolerance:
                    await self._engine.activate_weights(pause)
            if gap <= self._canary_tolerance:
                return Activated(gap)
            error = (
                f"policy {version} is refused: a log-probability of the canary differs from the trainer's by "
                f"{gap:.2e}, rollout.canary_tolerance is {self._canary_tolerance:.2e}"
            )
        except FAILURES as failure:
            error = f"policy {version} is refused: {failure}"
        self._readiness.refuse(version)
        return Activated(gap, error)

    @tracer.start_as_current_span("canary")
    async def _canary_gap(self, update: PolicyUpdate) -> float:
        """The largest, or the median, difference between the engine's log-probabilities and the trainer's."""
        canary = update.canary
        if not canary.logprobs or len(canary.logprobs) != len(canary.tokens) - 1:
            raise WeightError(
                f"its canary has {len(canary.tokens)} tokens and {len(canary.logprobs)} log-probabilities"
            )
        logprobs = await self._engine.score(canary.tokens, "staged" if self._canary_first else "served")
        gaps = [abs(a - b) for a, b in zip(logprobs, canary.logprobs, strict=True)]
        return self._gap_of(gaps) if all(map(math.isfinite, gaps)) else math.inf

    async def _manifest_of(self, update: PolicyUpdate) -> WeightManifest:
        manifest = WeightManifest.decode(await self._blobs.get(update.manifest))
        if manifest.policy_version != update.policy_version:
            raise WeightError(
                f"policy {update.policy_version} came with the manifest of policy {manifest.policy_version}"
            )
        return manifest

    async def _stage(self, manifest: WeightManifest, slot_wait_s: float) -> int:
        num_bytes = await self._engine.stage_weights(manifest, slot_wait_s)
        self._staged = manifest
        told = {"beamline.policy_version": manifest.policy_version, "beamline.num_bytes": num_bytes}
        trace.get_current_span().set_attributes(told)
        return num_bytes

    def _within(self, waiting_for: str) -> AbstractAsyncContextManager[None]:
        return deadline(self._deadline_s, f"{waiting_for} (weights.deadline_s)")


def pause_of(weights: WeightsSection) -> Pause:
    """What becomes of samples under way, in the engine's words."""
    match weights.pause, weights.aborted:
        case "abort", "continue":
            return "continue"
        case "keep" | "drain" | "abort" | "overlap" as pause, _:
            return pause
        case _:
            raise AssertionError(f"weights.pause={weights.pause!r} was checked when it was read")
