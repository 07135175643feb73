"""What passes between the reward service and a grading process: msgpack structs behind a 4-byte length.

The service sends a `Job`; the process answers with one `Verdict` or `Abstained` a text, in order, each as soon as it
is there.
"""

from typing import BinaryIO

import msgspec

from beamline.reward.grader import Verdict
from beamline.runtime.foreign_code import frame, read_frame

MAX_REPLY_BYTES = 64 * 1024
MAX_TEXT_CHARS = 200
"""Of `Verdict.pred` and of a reason: what people read, not what is computed with."""


class Job(msgspec.Struct, frozen=True, tag="Job"):
    """Grade these responses to one problem."""

    texts: list[str]
    ground_truth: str


class Abstained(msgspec.Struct, frozen=True, tag="Abstained"):
    """There is no verdict on this text, and this is the reason."""

    kind: str
    """timeout, crash, memory, error, aborted or environment."""
    why: str


type Outcome = Verdict | Abstained

_encoder = msgspec.msgpack.Encoder()
_outcomes: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Verdict | Abstained)
_jobs = msgspec.msgpack.Decoder(Job)


def encode_frame(item: Job | Outcome) -> bytes:
    """A struct with its length before it."""
    return frame(_encoder.encode(item))


def decode_outcome(payload: bytes) -> Outcome:
    """What a grading process said. Raises msgspec.DecodeError."""
    return _outcomes.decode(payload)


def read_job(stream: BinaryIO) -> Job | None:
    """The next job of a blocking stream; None at its end."""
    payload = read_frame(stream)
    return None if payload is None else _jobs.decode(payload)
