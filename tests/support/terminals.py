"""A command on a terminal of its own: what it shows, keys for it, and other sizes."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import Sequence

from beamline.runtime.deadline import deadline

DEADLINE_S = 20.0
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\r")
_HOME = "\x1b[H"
LEFT = "\x1b[?1049l"
"""What leaves the alternate screen."""


class OnTerminal:
    """Use `start`; `close` at the end."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int, settings: list[object]) -> None:
        self.process = process
        self.output = ""
        self._descriptor = descriptor
        self._settings = settings
        self._grown = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    @classmethod
    async def start(cls, command: Sequence[str], width: int, height: int) -> "OnTerminal":
        master, slave = pty.openpty()
        _set_size(master, width, height)
        settings = termios.tcgetattr(slave)
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        process = await asyncio.create_subprocess_exec(*command, stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        return cls(process, master, settings)

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def resize(self, width: int, height: int) -> None:
        """As a terminal does it: the size, then the signal."""
        _set_size(self._descriptor, width, height)
        self.process.send_signal(signal.SIGWINCH)

    async def until(self, *texts: str) -> list[str]:
        """Lines of the first screen from now on that shows all these."""
        async with deadline(DEADLINE_S, f"a screen with {texts}; now it is\n{self.output[-3000:]}"):
            while not all(text in "\n".join(self.screen()) for text in texts):
                self._grown.clear()
                await self._grown.wait()
        return self.screen()

    def screen(self) -> list[str]:
        """The newest whole screen."""
        frames = self.output.split(_HOME)
        return [line.rstrip() for line in _ESCAPE.sub("", frames[-2] if len(frames) > 1 else "").split("\n")]

    async def ended(self) -> tuple[int, str]:
        """Exit code, and what stands on the terminal after the alternate screen was left."""
        async with deadline(DEADLINE_S, f"the command to end; its screen is\n{self.output[-3000:]}"):
            code = await self.process.wait()
        self._read()
        return code, _ESCAPE.sub("", self.output.rpartition(LEFT)[2])

    def is_as_before(self) -> bool:
        """Whether the terminal takes lines and shows what is typed again."""
        return termios.tcgetattr(self._descriptor) == self._settings

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self._descriptor)

    def _read(self) -> None:
        try:
            self.output += os.read(self._descriptor, 1 << 20).decode(errors="replace")
        except OSError:  # the command has closed its side
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._grown.set()


def _set_size(descriptor: int, width: int, height: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
