"""A new policy into the engine: its weights, the check against the trainer's canary, and the way back."""

from statistics import median

from beamline.protocol.errors import BlobError, WeightError
from beamline.protocol.messages import PolicyUpdate
from beamline.rollout.engine import Engine
from beamline.rollout.readiness import Readiness
from beamline.runtime.blob_store import BlobStore
from beamline.weights.manifest import WeightManifest


class Activation:
    """Changes what the engine has, and tells `readiness` what is served.

    Args:
        engine: samples from one policy at a time.
        blobs: where manifests come from.
        readiness: judges a canary's gap.
        exact: whether every log-probability of the canary must agree, as in float32. In a lower precision the median
            counts: where a router's scores nearly tie, engine and trainer send a token to other experts, and single
            log-probabilities differ by whole units.
    """

    def __init__(self, engine: Engine, blobs: BlobStore, readiness: Readiness, *, exact: bool) -> None:
        self._engine = engine
        self._blobs = blobs
        self._readiness = readiness
        self._gap_of = max if exact else median
        self._manifest: WeightManifest | None = None

    async def activate(self, update: PolicyUpdate) -> str:
        """Serve a new policy in place of the old one; returns why it is refused, or nothing."""
        try:
            manifest = WeightManifest.decode(await self._blobs.get(update.manifest))
            await self._engine.load_weights(manifest, update.policy_version)
        except (WeightError, BlobError) as refused:
            self._readiness.refuse(update)
            return str(refused)
        gap = await self._canary_gap(update)
        error = self._readiness.judge(update, gap)
        if error:
            self._readiness.refuse(update, gap)
            return f"{error}; {await self._put_back()}"
        self._manifest = manifest
        self._readiness.serve(update, gap)
        return ""

    async def _put_back(self) -> str:
        """Load the policy that was served again, whose weights its transport keeps; says how it went."""
        before = self._readiness.served
        if before is None or self._manifest is None:
            return "no policy is served before it"
        try:
            await self._engine.load_weights(self._manifest, before.policy_version)
            error = self._readiness.judge(before, await self._canary_gap(before))
        except WeightError as gone:
            error = str(gone)
        if error:
            self._readiness.serve_none()
            return f"policy {before.policy_version} cannot be put back, so that none is served: {error}"
        return f"policy {before.policy_version} is served on"

    async def _canary_gap(self, update: PolicyUpdate) -> float:
        """The largest, or the median, difference between the engine's log-probabilities and the trainer's."""
        logprobs = await self._engine.score(update.canary.tokens)
        return self._gap_of(abs(a - b) for a, b in zip(logprobs, update.canary.logprobs, strict=True))
