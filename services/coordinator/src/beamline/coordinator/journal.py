"""What the coordinator writes down before it acts, so that a restart knows what it had decided."""

import msgspec

from beamline.protocol.errors import ProtocolError
from beamline.protocol.messages import CheckpointSaved, GroupFailed, PromptGroup, SaveRequest, ScoredGroup


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records."""


class Booted(Record, kw_only=True, tag="Booted/1"):
    """A coordinator process took over the run."""

    time: float
    """Unix time in seconds."""


class Resumed(Record, kw_only=True, tag="Resumed/1"):
    """The run goes on from a checkpoint; nothing was decided before."""

    path: str
    """The checkpoint's folder."""
    step: int
    started: float
    """Unix time in seconds of the run's first start."""
    position: int
    ends: dict[str, int]
    """Groups by how they ended."""
    prompts: list[PromptGroup]
    """Groups in flight, as they are published again."""
    evaluated: list[int]


class Issued(Record, kw_only=True, tag="Issued/1"):
    """A prompt is about to be published; `position` is the data cursor after it."""

    prompt: PromptGroup
    position: int


class Scored(Record, kw_only=True, tag="Scored/1"):
    scored: ScoredGroup


class Failed(Record, kw_only=True, tag="Failed/1"):
    failed: GroupFailed


class Batched(Record, kw_only=True, tag="Batched/1"):
    """A train batch is about to be published."""

    step: int
    kept: list[str]
    filtered: list[str]
    stale: list[str]


class Updated(Record, kw_only=True, tag="Updated/1"):
    """The trainer's update of the step was taken."""

    step: int
    failed: list[str] = []
    """Groups of the batch that it could not train."""


class Evaluated(Record, kw_only=True, tag="Evaluated/1"):
    """The evaluation of this policy version is complete and written."""

    policy_version: int


class SaveAsked(Record, kw_only=True, tag="SaveAsked/1"):
    """A request to keep a policy is about to be published."""

    request: SaveRequest


class Copied(Record, kw_only=True, tag="Copied/1"):
    """The trainer has its copy of what it was asked to keep."""

    step: int


class Saved(Record, kw_only=True, tag="Saved/1"):
    """What was asked for is on disk, or came to nothing."""

    saved: CheckpointSaved


class Closed(Record, kw_only=True, tag="Closed/1"):
    """No further step: what was in flight ended as stale."""


AnyRecord = (
    Booted | Resumed | Issued | Scored | Failed | Batched | Updated | Evaluated | SaveAsked | Copied | Saved | Closed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(payload: bytes) -> AnyRecord:
    """Decode a record. Raises ProtocolError: the journal was written by another version, or is damaged."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a journal record of {len(payload)} bytes cannot be read: {error}") from error
