"""Programs that one service has another's environment run: `python -m MODULE REQUEST FOLDER`.

A request is a JSON file of a struct of `beamline.protocol`; what comes of it is written into the folder.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from beamline.protocol.errors import BeamlineError, ConfigError

REFUSED = 2
"""Exit code of a program that says in one line on stderr what has to be mended."""


def write_request(path: Path, request: msgspec.Struct) -> None:
    """As JSON."""
    path.write_bytes(msgspec.json.encode(request))


def read_request[Request: msgspec.Struct](path: Path, kind: type[Request]) -> Request:
    """Raises ConfigError for a file that is no such request."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no {kind.__name__}: {error}") from error


def serve[Request: msgspec.Struct](
    kind: type[Request], work: Callable[[Request, Path], object], arguments: Sequence[str] | None = None
) -> int:
    """Do what the command line's request asks for; returns the exit code.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=work.__doc__)
    parser.add_argument("request", type=Path, help=f"JSON: {', '.join(kind.__struct_fields__)}")
    parser.add_argument("folder", type=Path, help="where the work is done")
    given = parser.parse_args(arguments)
    return exit_code(lambda: work(read_request(given.request, kind), given.folder))


def exit_code(work: Callable[[], object]) -> int:
    """0, or REFUSED after a line on stderr where the work raises what its user has to mend."""
    try:
        work()
    except (BeamlineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0
