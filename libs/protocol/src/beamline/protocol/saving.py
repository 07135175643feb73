"""What is asked of the trainer when a policy is to be kept, and what it answers."""

import msgspec

from beamline.protocol.base import Message
from beamline.protocol.errors import BlobError
from beamline.protocol.ring import BlobRef


class SaveRequest(Message, kw_only=True, tag="SaveRequest/1"):
    """Coordinator to trainer: keep the policy of that step, as a checkpoint, as an export, or both."""

    step: int
    checkpoint: bool
    """Everything that a run needs to go on: `<checkpoint root>/global_step_N`."""
    export: bool
    """The policy alone, as a Hugging Face directory: `<export root>/global_step_N/policy`."""
    coordinator_files: BlobRef | None = None
    """`CoordinatorFiles`, which a checkpoint takes in."""


class StateCopied(Message, kw_only=True, tag="StateCopied/1"):
    """Trainer to coordinator: what is to be kept is copied, and the policy may change again. The files follow."""

    step: int
    copy_s: float


class CheckpointSaved(Message, kw_only=True, tag="CheckpointSaved/1"):
    """Trainer to coordinator: what was asked for is complete on disk, or came to nothing."""

    step: int
    path: str = ""
    """The checkpoint's folder; empty where none was asked for."""
    export_path: str = ""
    """The Hugging Face directory; empty where none was asked for."""
    num_bytes: int = 0
    """Of the checkpoint."""
    save_s: float = 0.0
    """From the request to the manifest."""
    error: str = ""
    """Why not all that was asked for is there: the run has gone on without. A path is that of a whole one all the
    same."""


class CoordinatorFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="CoordinatorFiles/1"):
    """A blob: the coordinator's part of a checkpoint, by file name (no folders)."""

    files: dict[str, bytes]

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(payload: bytes | memoryview) -> "CoordinatorFiles":
        """Raises BlobError for bytes that are no such blob."""
        try:
            return _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BlobError(
                f"{memoryview(payload).nbytes} bytes are not the coordinator's files of a checkpoint: {error}"
            ) from error


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CoordinatorFiles)
