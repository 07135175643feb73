"""TensorBoard's event files, in `<run folder>/tensorboard`. Only this file imports tensorboardX."""

from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (  # generated
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]


class TensorboardLogger:
    """Writes each record at once, in this thread: the library's own queue stands still for good once a disk is full.

    Args:
        folder: made when missing; each start of a run adds a file.
        void_from: what earlier files have of this step and later ones is shown no more; None keeps all.
    """

    def __init__(self, folder: Path, void_from: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        if void_from is not None:
            self._writer.write_event(Event(step=void_from, session_log=SessionLog(status=SessionLog.START)))
            self._writer.flush()

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One scalar a value, under its own name."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write_event(Event(step=step, wall_time=time, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()
