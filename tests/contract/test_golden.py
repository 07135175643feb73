"""The bytes on the wire are pinned: every type reads what an earlier build wrote, and writes the same."""

from typing import get_args

import msgspec
import pytest

from beamline.protocol import blobs as b
from beamline.protocol import messages as m
from beamline.protocol.blobs import Blob, decode_blob, encode_blob
from beamline.protocol.codec import MAX_MESSAGE_BYTES, decode, decode_as, encode
from beamline.protocol.errors import BlobError, ProtocolError
from wire_examples import BLOBS, GOLDEN, MESSAGES, encoded

MESSAGE_TYPES: tuple[type[m.Message], ...] = get_args(m.AnyMessage)
BLOB_TYPES: tuple[type[Blob], ...] = get_args(b.Blob.__value__)

of_messages = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
of_blobs = pytest.mark.parametrize("blob", BLOBS, ids=lambda blob: type(blob).__name__)


def test_every_type_has_an_example_and_a_golden_file() -> None:
    names = sorted(kind.__name__ for kind in (*MESSAGE_TYPES, *BLOB_TYPES))
    assert sorted(encoded()) == names
    assert sorted(path.stem for path in GOLDEN.glob("*.bin")) == names


@of_messages
def test_no_example_leaves_a_field_at_its_default(message: m.Message) -> None:
    for field in msgspec.structs.fields(message):
        assert field.required or getattr(message, field.name) != field.default, field.name


@of_messages
def test_message_bytes(message: m.Message) -> None:
    golden = (GOLDEN / f"{type(message).__name__}.bin").read_bytes()
    assert encode(message) == golden
    assert decode(golden) == message
    assert decode_as(type(message), golden) == message


@of_blobs
def test_blob_bytes(blob: Blob) -> None:
    golden = (GOLDEN / f"{type(blob).__name__}.bin").read_bytes()
    assert encode_blob(blob) == golden
    assert decode_blob(type(blob), golden) == blob
    assert encode_blob(decode_blob(type(blob), memoryview(golden))) == golden


@of_messages
def test_a_message_is_frozen_tagged_and_versioned(message: m.Message) -> None:
    config = message.__struct_config__
    assert config.frozen
    assert config.tag == f"{type(message).__name__}/1"


@of_messages
def test_unknown_fields_and_versions_are_refused(message: m.Message) -> None:
    wire = msgspec.msgpack.decode(encode(message))
    with pytest.raises(ProtocolError, match=f"malformed {type(message).__name__}/1.*unknown field `surprise`"):
        decode(msgspec.msgpack.encode({**wire, "surprise": 1}))
    newer = f"{type(message).__name__}/2"
    with pytest.raises(ProtocolError, match=f"unknown message type '{newer}'; the nearest known one is "):
        decode(msgspec.msgpack.encode({**wire, "type": newer}))


@of_messages
def test_a_missing_field_is_refused_by_name(message: m.Message) -> None:
    wire = msgspec.msgpack.decode(encode(message))
    for field in msgspec.structs.fields(message):
        if field.required:
            rest = {key: value for key, value in wire.items() if key != field.encode_name}
            with pytest.raises(ProtocolError, match=f"missing required field `{field.encode_name}`"):
                decode(msgspec.msgpack.encode(rest))


@of_messages
def test_a_message_cut_short_is_refused(message: m.Message) -> None:
    payload = encode(message)
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(payload[:length])


@of_blobs
def test_a_blob_cut_short_is_refused(blob: Blob) -> None:
    payload = encode_blob(blob)
    for length in range(len(payload)):
        with pytest.raises(BlobError):
            decode_blob(type(blob), payload[:length])


@of_blobs
def test_unknown_blob_fields_are_refused(blob: Blob) -> None:
    wire = msgspec.msgpack.decode(encode_blob(blob))
    with pytest.raises(BlobError, match="unknown field `surprise`"):
        decode_blob(type(blob), msgspec.msgpack.encode({**wire, "surprise": 1}))


def test_another_type_than_expected_is_refused() -> None:
    with pytest.raises(ProtocolError, match="expected Phase, got StopRequest"):
        decode_as(m.Phase, encode(m.StopRequest()))
    with pytest.raises(BlobError, match=r"expected a Trajectories blob, got RoutedExperts of group g-000007"):
        decode_blob(b.Trajectories, encode_blob(BLOBS[1]))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"hello", b"\x80", b"\x93\x01\x02\x03", b"\x81\xa4type\xa2\xff\xfe"])
def test_noise_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)
    with pytest.raises(BlobError):
        decode_blob(b.Trajectories, payload)


def test_a_message_over_the_limit_is_refused_when_sent() -> None:
    metrics = m.Metrics(service="s", worker="w", step=0, values={f"{index:0100d}": 0.0 for index in range(3000)})
    with pytest.raises(ProtocolError, match=rf"Metrics of \d+ bytes is over the limit of {MAX_MESSAGE_BYTES}"):
        encode(metrics)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": b.pack_int32([1, 2])}, "column tokens has 8 bytes, expected 12"),
        ({"loss_mask": memoryview(b"\1")}, "column loss_mask has 1 bytes, expected 3"),
        ({"rollout_logprobs": memoryview(b"")}, "column rollout_logprobs has 0 bytes, expected 12"),
        ({"cu_seqlens": b.pack_int32([0, 3])}, "column cu_seqlens has 8 bytes, expected 12"),
        ({"cu_seqlens": b.pack_int32([0, 4, 3])}, "must start at 0 and never fall"),
        ({"texts": ["one"]}, "texts has 1 rows, expected 2"),
        ({"environment_rewards": [0.5]}, "environment_rewards has 1 rows, expected 2 or none"),
        ({"version_spans": []}, "version_spans has 0 rows, expected 2"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, object], text: str) -> None:
    wire = msgspec.msgpack.decode(encode_blob(BLOBS[0])) | changes
    with pytest.raises(BlobError, match=text):
        decode_blob(b.Trajectories, msgspec.msgpack.encode(wire))
