"""Every message between the services: the ring and its phases (`ring`), and what is beside it (`control`)."""

from beamline.protocol.base import Message, Part
from beamline.protocol.control import (
    EvalRequest,
    EvalResult,
    Heartbeat,
    Metrics,
    PauseRequest,
    ResumeRequest,
    ServiceFailed,
    StatusReply,
    StatusRequest,
    StopRequest,
    WorkerState,
)
from beamline.protocol.ring import (
    BlobRef,
    Canary,
    CheckpointSaved,
    FinishReason,
    Grade,
    GroupFailed,
    LeaseReport,
    MiniBatch,
    Phase,
    PhaseName,
    Place,
    PolicyLoaded,
    PolicyUpdate,
    PromptGroup,
    Purpose,
    Sampling,
    ScoredGroup,
    Task,
    TrainBatch,
    TrainGroup,
    TrajectoryGroup,
)

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

__all__ = [
    "AnyMessage",
    "ControlRequest",
    "Message",
    "Part",
    "RingMessage",
    "BlobRef",
    "Canary",
    "CheckpointSaved",
    "EvalRequest",
    "EvalResult",
    "FinishReason",
    "Grade",
    "GroupFailed",
    "Heartbeat",
    "LeaseReport",
    "Metrics",
    "MiniBatch",
    "PauseRequest",
    "Phase",
    "PhaseName",
    "Place",
    "PolicyLoaded",
    "PolicyUpdate",
    "PromptGroup",
    "Purpose",
    "ResumeRequest",
    "Sampling",
    "ScoredGroup",
    "ServiceFailed",
    "StatusReply",
    "StatusRequest",
    "StopRequest",
    "Task",
    "TrainBatch",
    "TrainGroup",
    "TrajectoryGroup",
    "WorkerState",
]
