"""The dashboard's server. The only file that knows uvicorn."""

import asyncio
import os
import socket
import webbrowser
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn

from beamline.coordinator.dashboard.access import new_token
from beamline.coordinator.dashboard.app import make_app
from beamline.coordinator.dashboard.runs import find, list_runs
from beamline.protocol.errors import ConfigError

HOST = "127.0.0.1"
NICENESS = 10
"""A run on the same machine goes first."""


def dashboard(run: str, runs: Path, port: int, *, opened: bool) -> None:
    """Print the page's URL and serve it until Ctrl-C.

    Args:
        run: a name under `runs` or a folder; empty is the newest, or the list where there is none.
        port: 0 takes a free one.
        opened: have the browser open it.

    Raises:
        ConfigError: no such run, or the port is taken.
    """
    run_dir = find(run, runs) if run else None
    runs = run_dir.parent if run_dir is not None else runs.resolve()
    newest = list_runs(runs)[:1] if run_dir is None else []
    name = run_dir.name if run_dir is not None else newest[0].name if newest else ""
    os.nice(NICENESS)
    asyncio.run(_serve(runs, name, _listen(port), opened))


async def _serve(runs: Path, name: str, listener: socket.socket, opened: bool) -> None:
    port, token, closing = listener.getsockname()[1], new_token(), asyncio.Event()
    config = uvicorn.Config(
        make_app(runs, token, port, closing), log_level="warning", access_log=False, server_header=False, lifespan="off"
    )
    url = f"http://{HOST}:{port}/" + (f"runs/{quote(name)}" if name else "") + f"?token={token}"
    print(f"{f'run {name}' if name else f'runs of {runs}'}: {url}", flush=True)
    if opened:
        await asyncio.to_thread(webbrowser.open, url)
    await _Server(config, closing).serve(sockets=[listener])


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigError(
            f"--port {port} cannot be used ({error.strerror}): leave it out to take a free one"
        ) from error


class _Server(uvicorn.Server):
    """Ends its streams before it waits for its connections."""

    def __init__(self, config: uvicorn.Config, closing: asyncio.Event) -> None:
        super().__init__(config)
        self._closing = closing
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        super().handle_exit(sig, frame)
