"""The end of a run, as anyone who looks at its folder can wait for it."""

import asyncio
import fcntl
import threading
from pathlib import Path

from beamline.coordinator.launch.run_folder import LOCK_FILE


def run_end(run_dir: Path) -> asyncio.Future[None]:
    """Done when the run's launcher gives up its lock. The thread is a daemon: Ctrl-C need not wait for it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def wait() -> None:
        with (run_dir / LOCK_FILE).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    threading.Thread(target=wait, daemon=True).start()
    return ended
