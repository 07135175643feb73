"""Who a service is on the bus: one file per service in the run's folder, readable by its owner alone."""

import os
from pathlib import Path

import msgspec

from beamline.protocol.errors import ConfigError

SERVICES = ("coordinator", "rollout", "reward", "trainer", "cli")
"""Users of the bus. `cli` is the command line and the launcher."""


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address of the broker and the user a service logs in as; empty user and password log in without."""

    url: str
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Credentials(url={self.url!r}, user={self.user!r})"

    @property
    def inbox_prefix(self) -> str:
        """Replies to this user arrive under it; no other user may listen there."""
        return f"_INBOX.{self.user}" if self.user else "_INBOX"


def credentials_path(run_dir: Path, service: str) -> Path:
    return run_dir / "credentials" / f"{service}.json"


def write_credentials(run_dir: Path, service: str, credentials: Credentials) -> Path:
    """Write a service's file (mode 0600) and return its path."""
    path = credentials_path(run_dir, service)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, msgspec.json.encode(credentials))
    return path


def read_credentials(run_dir: Path, service: str) -> Credentials:
    """Read a service's file. Raises ConfigError when it is missing or malformed."""
    path = credentials_path(run_dir, service)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: start the run with `beamline run`, which writes it") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a credentials file: {error}") from None


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically; only its owner may read it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)
