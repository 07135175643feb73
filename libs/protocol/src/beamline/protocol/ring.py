"""The ring and its phases: PromptGroup -> TrajectoryGroup -> ScoredGroup | GroupFailed -> TrainBatch -> PolicyUpdate.

Frozen facts. A tag carries its version ("PromptGroup/1"); unknown tags and unknown fields are refused by the codec.
Token ids are vocabulary indices; log-probabilities are natural logarithms.
"""

from enum import StrEnum

from msgspec import field

from beamline.protocol.base import Message, Part


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ENVIRONMENT = "environment"
    """What answers the policy between its turns broke."""


class BlobRef(Part, kw_only=True):
    """Where a blob lies. `owner` is what releases it: a group id, or "policy"."""

    owner: str
    key: str
    kind: str
    num_bytes: int
    checksum: str
    """xxh3-64 of the bytes, 16 hex digits."""


class Task(Part, kw_only=True):
    """What the reward service has to know of a prompt; passed through by rollout."""

    prompt_id: str
    data_source: str
    grader: str
    ground_truth: str
    environment: str = ""
    """What answers the policy between its turns; empty is one turn."""


class Sampling(Part, kw_only=True):
    temperature: float
    """0 is greedy."""
    top_p: float
    max_tokens: int
    stop: list[str] = field(default_factory=list[str])
    """Texts that end a completion; they stay in it."""


class PromptGroup(Message, kw_only=True, tag="PromptGroup/1"):
    """Coordinator to rollout: sample this prompt `len(seeds)` times."""

    group_id: str
    attempt: int
    purpose: Purpose
    task: Task
    prompt_tokens: list[int]
    sampling: Sampling
    seeds: list[int]
    """One per sample."""
    min_policy_version: int
    """A worker that serves an older policy must not take it."""
    deadline: float
    """Unix time in seconds after which the group is failed."""
    keep_routes: bool = False
    """Of an evaluation: send the routed experts too, as every group that is trained on does."""
    traceparent: str = ""
    """W3C trace context in which it was issued."""


class TrajectoryGroup(Message, kw_only=True, tag="TrajectoryGroup/1"):
    """Rollout to reward: the sampled group; tokens and text are in the blob."""

    group_id: str
    attempt: int
    purpose: Purpose
    task: Task
    worker: str
    trajectories: BlobRef
    routed_experts: BlobRef | None = None
    num_prompt_tokens: int
    response_lengths: list[int]
    """Tokens of each trajectory, those that an environment wrote among them."""
    finish_reasons: list[FinishReason]
    min_policy_version: int
    max_policy_version: int
    generate_s: float


class Grade(Part, kw_only=True):
    """One trajectory's verdict. An abstained grade has no reward and is never a zero."""

    reward: float | None
    """Shaped and summed; None when the grader abstained."""
    breakdown: dict[str, float]
    """{"raw": 1.0, "overlong_penalty": -0.2, "acc": 1.0}: before shaping, what shaping took, whether it is right; with
    an environment also "environment", its part of raw."""
    pred: str = ""
    """What the grader read as the answer."""
    why: str = ""
    """Reason of an abstention, or of a grade that needs one."""
    abstention: str = ""
    """Kind of an abstention: timeout, crash, memory, error, aborted or environment."""


class ScoredGroup(Message, kw_only=True, tag="ScoredGroup/1"):
    """Reward to coordinator: the group with its grades."""

    group_id: str
    attempt: int
    purpose: Purpose
    task: Task
    worker: str
    trajectories: BlobRef
    routed_experts: BlobRef | None = None
    num_prompt_tokens: int
    response_lengths: list[int]
    finish_reasons: list[FinishReason]
    min_policy_version: int
    max_policy_version: int
    grades: list[Grade]
    generate_s: float
    score_s: float


class GroupFailed(Message, kw_only=True, tag="GroupFailed/1"):
    """Rollout or reward to coordinator: this attempt came to nothing."""

    group_id: str
    attempt: int
    purpose: Purpose
    service: str
    worker: str
    kind: str
    text: str
    retryable: bool


class TrainGroup(Part, kw_only=True):
    """A group inside a train batch, with one advantage a trajectory (None leaves the trajectory out)."""

    group_id: str
    data_source: str
    trajectories: BlobRef
    routed_experts: BlobRef | None = None
    advantages: list[float | None]
    rewards: list[float | None] = field(default_factory=list[float | None])
    """What the advantages are made of, where the trainer makes them again after it took off a divergence."""
    traceparent: str = ""
    """As its prompt group's."""


class Place(Part, kw_only=True, array_like=True):
    """A trajectory of a batch: indices into `TrainBatch.groups` and into that group's samples."""

    group: int
    sample: int


class MiniBatch(Part, kw_only=True):
    """Ends in one optimizer update."""

    ranks: list[list[Place]]
    """Per data-parallel rank, token-balanced."""


class TrainBatch(Message, kw_only=True, tag="TrainBatch/1"):
    """Coordinator to trainer: turn policy step-1 into policy step."""

    step: int
    groups: list[TrainGroup]
    mini_batches: list[MiniBatch]


class PhaseName(StrEnum):
    START = "start"
    GENERATE = "generate"
    TRAIN = "train"
    SYNC = "sync"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"
    DONE = "done"


class Phase(Message, kw_only=True, tag="Phase/1"):
    """Coordinator to all, last value kept. Not granted: the former holder releases; granted: the holder starts."""

    sequence: int
    step: int
    phase: PhaseName
    policy_version: int
    granted: bool


class LeaseReport(Message, kw_only=True, tag="LeaseReport/1"):
    """A worker released its device memory for the phase of that sequence; all figures are measured."""

    service: str
    worker: str
    incarnation: str
    sequence: int
    freed_bytes: int
    kept_bytes: int
    """Of the memory that it had to release, what is still resident: 0 where the lease is honoured."""
    resident_bytes: int
