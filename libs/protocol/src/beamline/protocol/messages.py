"""Every message between the services.

`ring` has the ring and its phases, `sync` policies on their way into the engines, `saving` those that are kept,
`control` what is beside them.
"""

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
    Wait,
    WorkerState,
)
from beamline.protocol.ring import (
    BlobRef,
    FinishReason,
    Grade,
    GroupFailed,
    LeaseReport,
    MiniBatch,
    Phase,
    PhaseName,
    Place,
    PromptGroup,
    Purpose,
    Sampling,
    ScoredGroup,
    Task,
    TrainBatch,
    TrainGroup,
    TrajectoryGroup,
)
from beamline.protocol.saving import CheckpointSaved, SaveRequest, StateCopied
from beamline.protocol.sync import Canary, Fence, PolicyLoaded, PolicyPrepared, PolicyUpdate

RingMessage = PromptGroup | TrajectoryGroup | ScoredGroup | GroupFailed | TrainBatch | PolicyUpdate
ControlRequest = StatusRequest | PauseRequest | ResumeRequest | StopRequest | EvalRequest
AnyMessage = (
    RingMessage
    | PolicyPrepared
    | Fence
    | PolicyLoaded
    | Phase
    | LeaseReport
    | SaveRequest
    | StateCopied
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
    "Fence",
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
    "PolicyPrepared",
    "PolicyUpdate",
    "PromptGroup",
    "Purpose",
    "ResumeRequest",
    "Sampling",
    "SaveRequest",
    "ScoredGroup",
    "ServiceFailed",
    "StateCopied",
    "StatusReply",
    "StatusRequest",
    "StopRequest",
    "Task",
    "TrainBatch",
    "TrainGroup",
    "TrajectoryGroup",
    "Wait",
    "WorkerState",
]
