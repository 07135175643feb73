"""What rank 0 asks of the other ranks: msgpack on their standard input, each command after its length.

Every rank carries out the same commands in the same order, for the work meets in collectives.
"""

import asyncio
import struct

import msgspec

from beamline.protocol.messages import TrainBatch

_LENGTH = struct.Struct("<I")


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all commands."""


class Join(Command, kw_only=True):
    """The first one: meet the other ranks and build the model."""

    port: int
    """Loopback port of rank 0's store."""


class Train(Command, kw_only=True):
    """`Rank.train`, with trajectories that each rank fetches itself."""

    batch: TrainBatch
    lr: float


class Export(Command, kw_only=True):
    """`Rank.export`"""

    policy_version: int


class Score(Command, kw_only=True):
    """`Rank.score`"""

    tokens: list[int]


class Save(Command, kw_only=True):
    """`Rank.save`"""

    directory: str


class SaveWeights(Command, kw_only=True):
    """`Rank.save_weights`"""

    directory: str


class Trim(Command, kw_only=True):
    """`Rank.trim`"""


type AnyCommand = Join | Train | Export | Score | Save | SaveWeights | Trim

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def encode(command: AnyCommand) -> bytes:
    """One frame."""
    payload = _encoder.encode(command)
    return _LENGTH.pack(len(payload)) + payload


async def read(stream: asyncio.StreamReader) -> AnyCommand | None:
    """The next command; None when rank 0 has closed its end, which its death does too."""
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        return _decoder.decode(await stream.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
