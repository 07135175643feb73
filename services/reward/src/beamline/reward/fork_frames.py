"""What passes between the reward service and a fork server: one msgpack struct a packet of a Unix socket."""

import msgspec

MAX_PACKET_BYTES = 16 * 1024


class Fork(msgspec.Struct, frozen=True, tag="Fork"):
    """Make a grading process that serves the socket sent along."""


class Kill(msgspec.Struct, frozen=True, tag="Kill"):
    """End a grading process and whatever it started."""

    pid: int


class Loaded(msgspec.Struct, frozen=True, tag="Loaded"):
    """The grader is there; grading processes can be made."""


class Refused(msgspec.Struct, frozen=True, tag="Refused"):
    """The grader cannot be loaded."""

    why: str


class Forked(msgspec.Struct, frozen=True, tag="Forked"):
    """The answer to a Fork."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="Ended"):
    """A grading process is gone."""

    pid: int
    status: int
    """Exit status, or minus the signal that ended it."""


type Request = Fork | Kill
type Report = Loaded | Refused | Forked | Ended

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Fork | Kill)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Loaded | Refused | Forked | Ended)


def encode_packet(item: Request | Report) -> bytes:
    """One packet, of MAX_PACKET_BYTES at most."""
    return _encoder.encode(item)


def decode_request(packet: bytes) -> Request:
    """What the service asks for. Raises msgspec.DecodeError."""
    return _requests.decode(packet)


def decode_report(packet: bytes) -> Report:
    """What the fork server tells. Raises msgspec.DecodeError."""
    return _reports.decode(packet)
