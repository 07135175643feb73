"""The services as processes of this machine, each in its own interpreter, session and log."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from beamline.coordinator.launch.guard import Guard, end_group
from beamline.coordinator.launch.launcher import SERVICES, WorkerSpec
from beamline.protocol.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[6]
"""The folder that holds `services`."""

_LEFT_OUT = ("PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")

type Command = Callable[[WorkerSpec], Sequence[str]]


def interpreter(service: str, checkout: Path = CHECKOUT) -> Path:
    """A service's own Python. Raises ConfigError when it is not there."""
    path = checkout / "services" / service / ".venv" / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path.relative_to(checkout)} is missing: run `make setup` in {checkout}")
    return path


def check_interpreters(checkout: Path = CHECKOUT) -> None:
    """Raises ConfigError when a service's environment has not been made."""
    for service in SERVICES:
        interpreter(service, checkout)


def service_command(spec: WorkerSpec) -> Sequence[str]:
    """How a service is started."""
    module = f"beamline.{spec.service}"
    return (
        str(interpreter(spec.service)), "-m", module, "--run-dir", str(spec.run_dir), "--worker", spec.worker,
    )  # fmt: skip


def environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """What a service's process sees: the user's environment, less what would lead it astray, and the run's own.

    Proxies would catch loopback traffic; Python's home belongs to the interpreter that is running now, and without
    bytecode an engine imports for ten seconds more at every start. PYTHONPATH stays: a user's own code is found there.
    """
    kept = {
        name: value for name, value in base.items() if not name.lower().endswith("_proxy") and name not in _LEFT_OUT
    }
    return kept | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # the first batches would stall for seconds
        "VLLM_HOST_IP": "127.0.0.1",
    }


class LocalWorker:
    """A process and what it started; its process group bears its pid."""

    def __init__(self, process: asyncio.subprocess.Process, guard: Guard, service: str) -> None:
        self._process = process
        self._guard = guard
        self.pid = process.pid
        self.service = service

    async def wait(self) -> int:
        code = await self._process.wait()
        end_group(self.pid)
        self._guard.forget(self.pid)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, not its children: it drains them itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None


class LocalLauncher:
    """Starts workers on this machine. `command` says how, which tests use to start other programs."""

    def __init__(self, guard: Guard, base_environment: Mapping[str, str], command: Command = service_command) -> None:
        self._guard = guard
        self._base_environment = base_environment
        self._command = command
        self._workers: list[LocalWorker] = []

    async def start(self, spec: WorkerSpec) -> LocalWorker:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command(spec),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self._base_environment, spec.threads),
                start_new_session=True,
            )
        self._guard.watch(spec.worker, process.pid)
        worker = LocalWorker(process, self._guard, spec.service)
        self._workers = [other for other in self._workers if not other.ended] + [worker]
        return worker

    async def stop(self, deadline_s: float) -> None:
        running = [worker for worker in self._workers if not worker.ended]
        for worker in running:
            worker.signal(signal.SIGTERM)
        ends = {worker: asyncio.ensure_future(worker.wait()) for worker in running}
        # A coordinator finishes its step before it drains, which it cannot without the others.
        if others := [end for worker, end in ends.items() if worker.service != "coordinator"]:
            await asyncio.wait(others, timeout=deadline_s)
        for worker in running:
            end_group(worker.pid)
        await asyncio.gather(*ends.values())
        self._workers = []
