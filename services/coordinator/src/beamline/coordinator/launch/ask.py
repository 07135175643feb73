"""One question to a live run's coordinator, as user `cli`."""

from pathlib import Path

from beamline.coordinator.launch.run_folder import in_use
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import Message, StatusReply
from beamline.protocol.subjects import Subjects
from beamline.runtime.credentials import read_credentials
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.run_files import read_config

DEADLINE_S = 10.0


async def ask(run_dir: Path, request: Message) -> StatusReply:
    """Send a request and return how the run stands after it.

    Raises:
        ConfigError: the run has ended.
        DeadlineExceeded: the coordinator did not answer.
    """
    if not in_use(run_dir):
        raise ConfigError(f"run {run_dir.name} has ended: `beamline status {run_dir.name}` shows what it came to")
    bus = await connect(run_dir)
    try:
        reply = await bus.request(request, DEADLINE_S)
    finally:
        await bus.close()
    if not isinstance(reply, StatusReply):
        raise TypeError(f"the coordinator answered {type(request).__name__} with {type(reply).__name__}")
    return reply


async def connect(run_dir: Path) -> NatsBus:
    """A connection to the run's bus."""
    config = read_config(run_dir)
    return await NatsBus.connect(read_credentials(run_dir, "cli"), Subjects(config.bus.prefix, config.run.name))
