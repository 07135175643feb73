"""The metrics file as it grows: the bus says when to look, the file is what is shown."""

import asyncio
from pathlib import Path
from typing import BinaryIO

from beamline.coordinator.launch.ask import connect
from beamline.coordinator.launch.run_end import run_end
from beamline.coordinator.launch.run_folder import in_use
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import Message


def metrics_file(run_dir: Path) -> Path:
    """Raises ConfigError when the run has not written one yet."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"run {run_dir.name} has no metrics yet: they come with its first evaluation or step")
    return path


async def follow_metrics(run_dir: Path, output: BinaryIO) -> None:
    """Copy the run's metrics, those to come included, until the run has ended."""
    position = 0

    async def copy(_: Message | None = None) -> None:
        nonlocal position
        path = run_dir / "metrics.jsonl"
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                output.write(file.read())
                position = file.tell()
            output.flush()

    await copy()
    if not in_use(run_dir):
        return
    bus, ended = await connect(run_dir), run_end(run_dir)
    subjects = (bus.subjects.metrics("coordinator"), bus.subjects.evaluation)
    following = [asyncio.create_task(bus.subscribe(subject, copy)) for subject in subjects]
    try:
        await asyncio.wait({ended, *following}, return_when=asyncio.FIRST_COMPLETED)
        await copy()
    finally:
        for task in following:
            task.cancel()
        await bus.close()
