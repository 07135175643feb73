"""A policy on its way into the engines: PolicyUpdate -> PolicyPrepared -> Fence -> PolicyLoaded.

Every worker prepares a new policy while it serves the old one. Once all have answered, the fence opens, and all of them
activate it together.
"""

from msgspec import field

from beamline.protocol.base import Message, Part
from beamline.protocol.ring import BlobRef


class Canary(Part, kw_only=True):
    """A fixed text and the trainer's log-probabilities of its tokens 1..n-1, by which an engine checks itself."""

    tokens: list[int]
    logprobs: list[float]


class PolicyUpdate(Message, kw_only=True, tag="PolicyUpdate/1"):
    """Trainer to coordinator and every rollout worker: a new policy. Version 0 is published at the trainer's start."""

    step: int
    policy_version: int
    manifest: BlobRef
    """The encoded `beamline.weights.WeightManifest`."""
    canary: Canary
    stats: dict[str, float]
    """The trainer's statistics of the step, under the names of docs/metrics.md."""
    failed_groups: dict[str, str] = field(default_factory=dict[str, str])
    """Groups of the batch that could not be trained, by id: what is wrong with their blobs."""


class PolicyPrepared(Message, kw_only=True, tag="PolicyPrepared/1"):
    """Rollout to coordinator: the version's weights are here and verified, or why not. The old policy is served."""

    worker: str
    incarnation: str
    policy_version: int
    attempt: int
    """From 1; a further one answers a fence of that attempt."""
    num_bytes: int
    """Fetched by all ranks of the engine."""
    prepare_s: float
    error: str = ""


class Fence(Message, kw_only=True, tag="Fence/1"):
    """Coordinator to every rollout worker, last value kept: what to do with a prepared policy."""

    policy_version: int
    attempt: int
    """A worker whose attempt before this one failed tries again."""
    is_open: bool
    """Closed: prepare only. Open: activate; whoever has not prepared it serves nothing until the next policy."""


class PolicyLoaded(Message, kw_only=True, tag="PolicyLoaded/1"):
    """Rollout to coordinator: this worker serves the version, or says why it does not."""

    worker: str
    incarnation: str
    policy_version: int
    attempt: int
    """Of the fence that it answers."""
    load_s: float
    """From the open fence: pausing, loading, and the canary."""
    canary_gap: float
    """Largest |engine - trainer| log-probability over the canary."""
    error: str = ""
