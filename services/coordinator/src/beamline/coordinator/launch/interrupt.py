"""Ctrl-C: the first one asks the run to end after its step, the second one ends it now. SIGTERM ends it now."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

from beamline.coordinator.launch.supervisor import Notify
from beamline.protocol.errors import BeamlineError


class Interrupted(BeamlineError):
    """The user ended the run before its end."""


class Interrupts:
    """Turns signals into a request and then into an end.

    Args:
        ask: asks the run to end after its step; raises BeamlineError when nobody answers.
        notify: shows a line.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], notify: Notify) -> None:
        self._ask = ask
        self._notify = notify
        self._asked = False
        self._end = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Take over the signals of this process."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._end.set)

    @staticmethod
    def uninstall() -> None:
        """Give them back: whoever interrupts what follows ends it at once."""
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)

    @property
    def asked(self) -> bool:
        """Whether the run was asked to end."""
        return self._asked

    def interrupt(self) -> None:
        """One Ctrl-C."""
        if self._asked:
            self._end.set()
            return
        self._asked = True
        self._notify("stopping after the step under way; Ctrl-C again stops at once")
        self._asking = asyncio.get_running_loop().create_task(self._request())

    async def wait(self) -> None:
        """Returns when the run is to end at once."""
        await self._end.wait()

    async def _request(self) -> None:
        try:
            await self._ask()
        except BeamlineError as error:
            self._notify(f"the run cannot be asked ({error}); stopping at once")
            self._end.set()
