"""The bus and blob store that a run's configuration asks for, opened as one of its services."""

from pathlib import Path

from beamline.protocol.config import RunConfig
from beamline.protocol.subjects import Subjects
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.credentials import read_credentials
from beamline.runtime.jetstream_blobs import JetStreamBlobStore
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.shm_blobs import ShmBlobStore, shm_root


async def open_clients(
    config: RunConfig, subjects: Subjects, run_dir: Path, service: str, name: str
) -> tuple[NatsBus, BlobStore]:
    """Connect as `service`; `name` is what the broker calls the connection.

    Raises:
        ConfigError: no credentials in the run's folder.
        BusUnavailable: nobody answers, or the login is refused.
    """
    credentials = read_credentials(run_dir, service)
    bus = await NatsBus.connect(credentials, subjects, name=name, ack_wait_s=config.bus.ack_wait_s)
    if config.bus.blob_store == "jetstream":
        return bus, JetStreamBlobStore(bus.connection, subjects)
    return bus, ShmBlobStore(shm_root(subjects, run_dir))
