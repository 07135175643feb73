"""Bytes to messages and back: msgpack by msgspec, one typed decoder, and errors that name what is wrong."""

import difflib
from typing import cast, get_args

import msgspec

from beamline.protocol.errors import ProtocolError
from beamline.protocol.messages import AnyMessage, Message

MAX_MESSAGE_BYTES = 256 * 1024
"""Control messages stay under this; anything larger belongs in a blob."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_tags = sorted(str(kind.__struct_config__.tag) for kind in get_args(AnyMessage))


class _Tagged(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)


def encode(message: Message) -> bytes:
    """Encode a message. Raises ProtocolError when it exceeds MAX_MESSAGE_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__
        raise ProtocolError(
            f"{kind} of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}: put its tensors into a blob"
        )
    return payload


def decode(payload: bytes) -> AnyMessage:
    """Decode any message. Raises ProtocolError naming the tag, the field and the nearest known tag."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(_explain(payload, error)) from error


def decode_as[M: Message](kind: type[M], payload: bytes) -> M:
    """Decode a message of one type. Raises ProtocolError when it is another one."""
    message = decode(payload)
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    return cast(M, message)


def _explain(payload: bytes, error: Exception) -> str:
    try:
        tag = _tag_decoder.decode(payload).type
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"{len(payload)} bytes that are not a Beamline message: {error}"
    if tag in _tags:
        return f"malformed {tag}: {error}"
    nearest = difflib.get_close_matches(tag, _tags, n=1, cutoff=0.3)
    hint = f"; the nearest known one is {nearest[0]}" if nearest else ""
    return f"unknown message type {tag!r}{hint}: do all services run the same version of Beamline?"
