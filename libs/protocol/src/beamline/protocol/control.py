"""Beside the ring: lives and numbers of the workers, evaluations, and requests from the command line."""

from enum import StrEnum

from msgspec import field

from beamline.protocol.base import Message, Part
from beamline.protocol.ring import PhaseName


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    PAUSED = "paused"
    DRAINING = "draining"


class Wait(Part, kw_only=True):
    """Something that a worker waits for at this moment. Times are Unix seconds."""

    what: str
    """In words, such as "PolicyUpdate for step 3 from the trainer"."""
    since: float
    until: float
    """When it gives up and says so; 0 for a wait that ends with the run."""
    on: list[str] = field(default_factory=list[str])
    """Services or workers that must act for it to end, where that is known."""


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
    waits: list[Wait] = field(default_factory=list[Wait])
    """Oldest first; the newest ones are left out where there are very many."""


class ServiceFailed(Message, kw_only=True, tag="ServiceFailed/1"):
    """The last word of a process that ends by an error."""

    service: str
    worker: str
    error: str
    traceback: str


class Metrics(Message, kw_only=True, tag="Metrics/1"):
    """One service's numbers, for one step or live (`step` -1), under the names of `metric_schema`."""

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
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Workers without which the run goes on at present, each with the reason."""
    phase_since: float = 0.0
    """When the phase was entered, in Unix seconds."""
    silences_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds since the last heartbeat of each worker."""
