"""How a log record is printed: coloured on a terminal, plain elsewhere, or as the JSON line that it was."""

import sys
import zlib

import msgspec
from rich.console import Console
from rich.text import Text

from beamline.coordinator.observe.logs import Print
from beamline.runtime.json_log import LogLine

_LEVEL_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
_WORKER_STYLES = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_NO_TIME = "--:--:--.---"


def choose_print(*, json: bool) -> Print:
    """By where standard output goes."""
    if json:
        return print_json
    if not sys.stdout.isatty():
        return print_plain
    console = Console(highlight=False, markup=False, soft_wrap=True)
    return lambda record: console.print(coloured(record))


def print_json(record: LogLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()


def print_plain(record: LogLine) -> None:
    print("".join(part for part, _ in _parts(record)), flush=True)


def coloured(record: LogLine) -> Text:
    """A record for a terminal."""
    return Text.assemble(*_parts(record))


def _parts(record: LogLine) -> list[tuple[str, str]]:
    """Pieces of text with their styles; further lines of a message are indented."""
    worker_style = _WORKER_STYLES[zlib.crc32(record.worker.encode()) % len(_WORKER_STYLES)]
    level_style = _LEVEL_STYLES.get(record.level, "")
    first, *more = [*record.message.splitlines(), *record.exception.splitlines()] or [""]
    step = f" (step {record.step})" if record.step is not None else ""
    source = [(f"{record.logger}{step}: ", "dim")] if record.logger else []
    return [
        (f"{record.time[11:23] or _NO_TIME} ", "dim"),
        (f"{record.worker:<12} ", worker_style),
        (f"{record.level if record.logger else '':<8} ", level_style),
        *source,
        ("\n".join([first, *(f"    {line}" for line in more)]), level_style),
    ]
