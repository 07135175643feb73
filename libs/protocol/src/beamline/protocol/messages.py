"""Everything that flows between the services, as frozen facts.

The ring: PromptGroup -> TrajectoryGroup -> ScoredGroup | GroupFailed -> TrainBatch -> PolicyUpdate. Beside it: phases
and leases, worker state, evaluation, control. A tag carries its version ("PromptGroup/1"); unknown tags and unknown
fields are refused by the codec. Token ids are vocabulary indices; log-probabilities are natural logarithms.
"""

from enum import StrEnum

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs inside messages."""


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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


class Sampling(Part, kw_only=True):
    temperature: float
    """0 is greedy."""
    top_p: float
    max_tokens: int


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
    """Sampled tokens of each trajectory."""
    finish_reasons: list[FinishReason]
    min_policy_version: int
    max_policy_version: int
    generate_s: float


class Grade(Part, kw_only=True):
    """One trajectory's verdict. An abstained grade has no reward and is never a zero."""

    reward: float | None
    """Shaped and summed; None when the grader abstained."""
    breakdown: dict[str, float]
    """{"raw": 1.0, "overlong_penalty": -0.2, "acc": 1.0}: before shaping, what shaping took, whether it is right."""
    pred: str = ""
    """What the grader read as the answer."""
    why: str = ""
    """Reason of an abstention, or of a grade that needs one."""


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
    trajectories: BlobRef
    routed_experts: BlobRef | None = None
    advantages: list[float | None]


class Place(Part, kw_only=True, array_like=True):
    """A trajectory of a batch: indices into `TrainBatch.groups` and into that group's samples."""

    group: int
    sample: int


class MiniBatch(Part, kw_only=True):
    """Ends in one optimizer update."""

    num_loss_tokens: int
    """Sum of the loss mask over the mini-batch: the global denominator of token_mean."""
    ranks: list[list[Place]]
    """Per data-parallel rank, token-balanced."""


class TrainBatch(Message, kw_only=True, tag="TrainBatch/1"):
    """Coordinator to trainer: turn policy step-1 into policy step."""

    step: int
    groups: list[TrainGroup]
    mini_batches: list[MiniBatch]


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


class PolicyLoaded(Message, kw_only=True, tag="PolicyLoaded/1"):
    """Rollout to coordinator: this worker serves the version, or says why it does not."""

    worker: str
    incarnation: str
    policy_version: int
    load_s: float
    canary_gap: float
    """Largest |engine - trainer| log-probability over the canary."""
    error: str = ""


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
    """A worker released its device memory for the phase of that sequence; both figures are measured."""

    service: str
    worker: str
    incarnation: str
    sequence: int
    freed_bytes: int
    resident_bytes: int


class CheckpointSaved(Message, kw_only=True, tag="CheckpointSaved/1"):
    """Trainer to coordinator: the checkpoint of that step is complete."""

    step: int
    path: str
    num_bytes: int
    save_s: float


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    PAUSED = "paused"
    DRAINING = "draining"


class Heartbeat(Message, kw_only=True, tag="Heartbeat/1"):
    """Every worker, every few seconds."""

    service: str
    worker: str
    incarnation: str
    """Changes with every start of the process."""
    pid: int
    state: WorkerState
    policy_version: int
    in_flight: int
    rss_bytes: int
    waiting_for: str = ""


class ServiceFailed(Message, kw_only=True, tag="ServiceFailed/1"):
    """The last word of a process that ends by an error."""

    service: str
    worker: str
    error: str
    traceback: str


class Metrics(Message, kw_only=True, tag="Metrics/1"):
    """One service's numbers, for one step or live (`step` -1)."""

    service: str
    worker: str
    step: int
    values: dict[str, float]


class EvalResult(Message, kw_only=True, tag="EvalResult/1"):
    """Coordinator: one evaluated data source. Accuracies are shares in [0, 1] with a 95 % bootstrap interval."""

    step: int
    policy_version: int
    name: str
    num_problems: int
    num_samples: int
    values: dict[str, float]


class EvalRequest(Message, kw_only=True, tag="EvalRequest/1"):
    """Anyone to coordinator: evaluate before the next step."""


class StatusRequest(Message, kw_only=True, tag="StatusRequest/1"):
    pass


class PauseRequest(Message, kw_only=True, tag="PauseRequest/1"):
    """Admit no further groups until resumed."""


class ResumeRequest(Message, kw_only=True, tag="ResumeRequest/1"):
    pass


class StopRequest(Message, kw_only=True, tag="StopRequest/1"):
    """Finish the step under way, then end the run as if it had been its last."""


class StatusReply(Message, kw_only=True, tag="StatusReply/1"):
    run: str
    step: int
    num_steps: int
    phase: PhaseName
    policy_version: int
    paused: bool
    waiting_for: str
    ledger: dict[str, int]
    workers: list[Heartbeat]
    metrics: dict[str, float]


RingMessage = PromptGroup | TrajectoryGroup | ScoredGroup | GroupFailed | TrainBatch | PolicyUpdate
ControlRequest = StatusRequest | PauseRequest | ResumeRequest | StopRequest | EvalRequest
AnyMessage = (
    RingMessage
    | PolicyLoaded
    | Phase
    | LeaseReport
    | CheckpointSaved
    | Heartbeat
    | ServiceFailed
    | Metrics
    | EvalResult
    | ControlRequest
    | StatusReply
)
