"""The run's queues on its broker, made before any service asks for them. Nothing of an earlier run may be in them."""

from pathlib import Path

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BusUnavailable, ConfigError, DeadlineExceeded, PermissionDenied
from beamline.protocol.messages import StatusRequest
from beamline.protocol.subjects import Subjects
from beamline.runtime.credentials import read_credentials
from beamline.runtime.nats_bus import NatsBus

ANSWER_S = 1.0
"""A live coordinator answers in milliseconds."""


async def make_streams(config: RunConfig, subjects: Subjects, run_dir: Path) -> None:
    """As the coordinator's user, who may. A broker of the run's own is empty; the user's may hold an earlier run's.

    Raises:
        ConfigError: a run of that name is live on the user's broker, or what is left of one cannot be removed.
    """
    bus = await NatsBus.connect(read_credentials(run_dir, "coordinator"), subjects, ack_wait_s=config.bus.ack_wait_s)
    try:
        if config.bus.url:
            await _empty(bus, config)
        await bus.ensure_streams(blobs=config.bus.blob_store == "jetstream")
    finally:
        await bus.close()


async def _empty(bus: NatsBus, config: RunConfig) -> None:
    where = f"bus.url={config.bus.url}"
    try:
        if not (is_live := await _is_live(bus)):
            await bus.remove_streams()
    except (PermissionDenied, BusUnavailable) as error:
        raise ConfigError(
            f"{where}: what an earlier run called {config.run.name!r} may have left there cannot be removed ({error}): "
            f"allow it to delete the streams {', '.join(bus.stream_names)}, or use another run.name"
        ) from None
    if is_live:
        raise ConfigError(
            f"{where}: a run called {config.run.name!r} is live there under bus.prefix={config.bus.prefix}: use "
            "another run.name or bus.prefix"
        )


async def _is_live(bus: NatsBus) -> bool:
    try:
        await bus.request(StatusRequest(), ANSWER_S)
    except DeadlineExceeded:
        return False
    return True
