"""Which libraries each service runs with, asked of the service's own interpreter."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from beamline.protocol.errors import ConfigError, DeadlineExceeded

_LIST_LIBRARIES = """
import json, platform
from importlib.metadata import distributions
libraries = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
print(json.dumps({"python": platform.python_version(), **dict(sorted(libraries.items(), key=lambda i: i[0].lower()))}))
"""


def library_versions(interpreters: Mapping[str, Path], deadline_s: float = 60.0) -> dict[str, dict[str, str]]:
    """Versions of Python and of every installed distribution, by service; nothing is imported for it.

    Args:
        interpreters: each service's Python.
        deadline_s: how long one of them may take, in seconds.

    Raises:
        ConfigError: an interpreter that is missing or does not answer as one.
        DeadlineExceeded: one that does not answer in time.
    """
    return {service: _ask(service, python, deadline_s) for service, python in interpreters.items()}


def _ask(service: str, python: Path, deadline_s: float) -> dict[str, str]:
    command = [str(python), "-I", "-c", _LIST_LIBRARIES]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, timeout=deadline_s)
        return msgspec.json.decode(answer.stdout, type=dict[str, str])
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"the library versions of {service} from {python}", deadline_s) from None
    except (OSError, subprocess.CalledProcessError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{service}'s interpreter {python} does not run ({error}): set the services up again"
        ) from error
