"""Columnar blobs: a struct a blob, a raw little-endian buffer a column, `cu_seqlens` for the rows of each sequence.

Legend: N trajectories of a group, T response tokens of all of them, R routed rows, L layers, K experts a token.
Columns decode as memoryviews into the payload (no copy); consumers wrap them with `numpy.frombuffer`.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from beamline.protocol.errors import BlobError
from beamline.protocol.messages import FinishReason


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) of a trajectory were sampled from `policy_version`."""

    policy_version: int
    start: int
    end: int


class Trajectories(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="Trajectories/1"):
    """The sampled side of one prompt group. All trajectories share the prompt.

    Raises:
        BlobError: columns whose lengths do not fit each other.
    """

    group_id: str
    prompt_tokens: memoryview
    """int32 [P]"""
    cu_seqlens: memoryview
    """int32 [N + 1]: trajectory i owns response rows cu_seqlens[i] to cu_seqlens[i + 1]."""
    tokens: memoryview
    """int32 [T]"""
    loss_mask: memoryview
    """uint8 [T]: 1 where the policy sampled the token."""
    rollout_logprobs: memoryview
    """float32 [T]: the engine's, at sampling time and at the run's temperature."""
    finish_reasons: list[FinishReason]
    version_spans: list[list[VersionSpan]]
    texts: list[str]
    """Of the whole response, what an environment wrote in it too."""
    environment_rewards: list[float] = msgspec.field(default_factory=list[float])
    """What an environment gave each trajectory; none where there is no environment."""

    def __post_init__(self) -> None:
        name = f"trajectories of group {self.group_id}"
        num_tokens = _check_cu_seqlens(name, self.cu_seqlens, self.num_trajectories)
        _check_bytes(name, "tokens", self.tokens, 4 * num_tokens)
        _check_bytes(name, "loss_mask", self.loss_mask, num_tokens)
        _check_bytes(name, "rollout_logprobs", self.rollout_logprobs, 4 * num_tokens)
        for column, rows in (("version_spans", self.version_spans), ("texts", self.texts)):
            if len(rows) != self.num_trajectories:
                raise BlobError(f"{name}: {column} has {len(rows)} rows, expected {self.num_trajectories}")
        if len(self.environment_rewards) not in (0, self.num_trajectories):
            raise BlobError(
                f"{name}: environment_rewards has {len(self.environment_rewards)} rows, expected "
                f"{self.num_trajectories} or none"
            )

    @property
    def num_trajectories(self) -> int:
        return len(self.finish_reasons)


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="RoutedExperts/1"):
    """Expert ids [R, L, K] of one prompt group: prompt + response - 1 rows a trajectory; dense layers keep a slot.

    A trajectory that was aborted before its first token has no rows.

    Raises:
        BlobError: columns whose lengths do not fit each other, or an unknown dtype.
    """

    group_id: str
    num_layers: int
    top_k: int
    dtype: str
    """uint8 up to 256 experts, uint16 above."""
    cu_seqlens: memoryview
    """int32 [N + 1]"""
    ids: memoryview
    """[R, L, K]"""

    def __post_init__(self) -> None:
        name = f"routed experts of group {self.group_id}"
        if self.dtype not in ("uint8", "uint16"):
            raise BlobError(f"{name}: dtype {self.dtype!r}, expected uint8 or uint16")
        num_rows = _check_cu_seqlens(name, self.cu_seqlens, memoryview(self.cu_seqlens).nbytes // 4 - 1)
        width = self.num_layers * self.top_k * (1 if self.dtype == "uint8" else 2)
        _check_bytes(name, "ids", self.ids, num_rows * width)


type Blob = Trajectories | RoutedExperts

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Trajectories | RoutedExperts] = msgspec.msgpack.Decoder(Trajectories | RoutedExperts)


def pack_int32(values: Sequence[int]) -> memoryview:
    """A little-endian int32 column."""
    return memoryview(array("i", values)).cast("B")


def pack_float32(values: Sequence[float]) -> memoryview:
    """A little-endian float32 column."""
    return memoryview(array("f", values)).cast("B")


def cumulative(lengths: Sequence[int]) -> memoryview:
    """The `cu_seqlens` column of these lengths: [0, l0, l0 + l1, ...]."""
    return pack_int32(list(accumulate(lengths, initial=0)))


def encode_blob(blob: Blob) -> bytes:
    """Encode a blob."""
    return _encoder.encode(blob)


def decode_blob[B: (Trajectories, RoutedExperts)](kind: type[B], payload: bytes | memoryview) -> B:
    """Decode a blob of one kind; its columns are views into `payload`.

    Raises:
        BlobError: not a blob, another kind, or columns that do not fit each other.
    """
    try:
        blob = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BlobError(f"{memoryview(payload).nbytes} bytes are not a {kind.__name__} blob: {error}") from error
    if not isinstance(blob, kind):
        raise BlobError(f"expected a {kind.__name__} blob, got {type(blob).__name__} of group {blob.group_id}")
    return blob


def _check_cu_seqlens(name: str, column: memoryview, num_rows: int) -> int:
    """Total number of rows; the column must start at 0, never fall, and have one entry more than rows."""
    _check_bytes(name, "cu_seqlens", column, 4 * (num_rows + 1))
    ends = column.cast("B").cast("i")
    if ends[0] != 0 or any(ends[i] > ends[i + 1] for i in range(num_rows)):
        raise BlobError(f"{name}: cu_seqlens {list(ends)} must start at 0 and never fall")
    return ends[num_rows]


def _check_bytes(name: str, column: str, value: memoryview, expected: int) -> None:
    if value.nbytes != expected:
        raise BlobError(f"{name}: column {column} has {value.nbytes} bytes, expected {expected}")
