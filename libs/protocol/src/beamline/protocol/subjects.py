"""Every NATS subject, stream, durable and dedupe id. All of them begin with `<prefix>.<run>`.

work.rollout.train|eval   PromptGroup                      work queue, durable "rollout"
work.reward               TrajectoryGroup                  work queue, durable "reward"
work.coordinator          ScoredGroup, GroupFailed, PolicyPrepared, PolicyLoaded, LeaseReport,
                          StateCopied, CheckpointSaved     likewise
work.trainer              TrainBatch, SaveRequest          work queue, durable "trainer"
policy, fence, phase      PolicyUpdate, Fence, Phase       last value kept
journal                   the coordinator's own records    kept for the whole run
blob.<owner>.<key>        chunks of blobs                  only between hosts
heartbeat.<worker>, metrics.<service>, eval, error.<worker>   plain publish and subscribe
control                   StatusRequest, PauseRequest, ...   request and reply, answered by the coordinator
"""

import re

import msgspec

from beamline.protocol import messages as m
from beamline.protocol.errors import ConfigError

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Route(msgspec.Struct, frozen=True):
    """Where a message goes. `dedupe_id` is None where a repeat does no harm."""

    subject: str
    dedupe_id: str | None
    persistent: bool


class Subjects(msgspec.Struct, frozen=True):
    """The names of one run.

    Raises:
        ConfigError: prefix or run is not one subject token (letters, digits, `_`, `-`; at most 64).
    """

    prefix: str
    run: str

    def __post_init__(self) -> None:
        for field, value in (("bus.prefix", self.prefix), ("run.name", self.run)):
            if not _TOKEN.fullmatch(value):
                raise ConfigError(f"{field}={value!r}: use 1 to 64 letters, digits, '_' or '-'")

    @property
    def root(self) -> str:
        return f"{self.prefix}.{self.run}"

    def stream(self, name: str) -> str:
        """Name of a JetStream stream: work, last, journal or blob."""
        return f"{self.prefix}-{self.run}-{name}"

    @property
    def work(self) -> str:
        return f"{self.root}.work.>"

    @property
    def journal(self) -> str:
        return f"{self.root}.journal"

    @property
    def policy(self) -> str:
        return f"{self.root}.policy"

    @property
    def fence(self) -> str:
        return f"{self.root}.fence"

    @property
    def phase(self) -> str:
        return f"{self.root}.phase"

    @property
    def control(self) -> str:
        return f"{self.root}.control"

    @property
    def evaluation(self) -> str:
        return f"{self.root}.eval"

    def queue(self, service: str) -> str:
        """Filter of a service's work queue, for its durable consumer."""
        return f"{self.root}.work.rollout.>" if service == "rollout" else f"{self.root}.work.{service}"

    def heartbeat(self, worker: str = "*") -> str:
        return f"{self.root}.heartbeat.{worker}"

    def metrics(self, service: str = "*") -> str:
        return f"{self.root}.metrics.{service}"

    def error(self, worker: str = "*") -> str:
        return f"{self.root}.error.{worker}"

    def blob(self, owner: str, key: str = ">") -> str:
        return f"{self.root}.blob.{owner}.{key}"

    def route(self, message: m.Message) -> Route:
        """Where a message goes, by its type."""
        work = f"{self.root}.work"
        match message:
            case m.PromptGroup():
                return _kept(f"{work}.rollout.{message.purpose}", message, message.group_id, message.attempt)
            case m.TrajectoryGroup():
                return _kept(f"{work}.reward", message, message.group_id, message.attempt)
            case m.ScoredGroup() | m.GroupFailed():
                return _kept(f"{work}.coordinator", message, message.group_id, message.attempt)
            case m.TrainBatch():
                return _kept(f"{work}.trainer", message, message.step)
            case m.SaveRequest():
                return _kept(f"{work}.trainer", message, message.step, message.checkpoint, message.export)
            case m.PolicyLoaded():
                key = (message.worker, message.incarnation, message.policy_version, message.attempt)
                return _kept(f"{work}.coordinator", message, *key, bool(message.error))
            case m.PolicyPrepared():
                key = (message.worker, message.incarnation, message.policy_version, message.attempt)
                return _kept(f"{work}.coordinator", message, *key, bool(message.error))
            case m.LeaseReport():
                return _kept(f"{work}.coordinator", message, message.worker, message.incarnation, message.sequence)
            case m.StateCopied():
                return _kept(f"{work}.coordinator", message, message.step, message.copy_s)
            case m.CheckpointSaved():
                # A step may be saved twice: a checkpoint first, and what a stopped run lacks at its end.
                return _kept(f"{work}.coordinator", message, message.step, message.save_s)
            case m.PolicyUpdate():
                return Route(self.policy, None, persistent=True)
            case m.Fence():
                return Route(self.fence, None, persistent=True)
            case m.Phase():
                return Route(self.phase, None, persistent=True)
            case m.Heartbeat():
                return Route(self.heartbeat(message.worker), None, persistent=False)
            case m.Metrics():
                return Route(self.metrics(message.service), None, persistent=False)
            case m.ServiceFailed():
                return Route(self.error(message.worker), None, persistent=False)
            case m.EvalResult():
                return Route(self.evaluation, None, persistent=False)
            case _:
                raise TypeError(f"{type(message).__name__} is a request: send it with Bus.request")


def _kept(subject: str, message: m.Message, *key: object) -> Route:
    dedupe_id = ":".join((type(message).__name__, *map(str, key)))
    return Route(subject, dedupe_id, persistent=True)
