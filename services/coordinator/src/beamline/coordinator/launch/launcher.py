"""Where a run's services live, behind one interface: `local.LocalLauncher` starts them as processes of this machine."""

from pathlib import Path
from typing import Protocol

import msgspec

SERVICES = ("coordinator", "rollout", "reward", "trainer")


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to start: `python -m beamline.<service> --run-dir <run_dir> --worker <worker>`."""

    service: str
    worker: str
    """Unique in the run, and one NATS subject token."""
    run_dir: Path
    threads: int
    """CPU threads that its numerical libraries may use."""

    @property
    def log(self) -> Path:
        """Where its output goes; a restart appends."""
        return self.run_dir / "logs" / f"{self.worker}.log"


class Worker(Protocol):
    """A started worker."""

    async def wait(self) -> int:
        """Exit code once it has ended with everything it started; minus the signal's number if a signal ended it."""
        ...


class Launcher(Protocol):
    """Starts workers and ends them."""

    async def start(self, spec: WorkerSpec) -> Worker:
        """Start one worker. Raises ConfigError when it cannot be started."""
        ...

    async def stop(self, deadline_s: float) -> None:
        """End every worker: politely at first, by force after the deadline. A repeat does nothing."""
        ...
