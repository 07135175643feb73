"""ENV_FILE: a file of NAME=value lines that counts as the environment of every command, and of what a run starts.

For what a site has: NCCL's settings, WANDB_API_KEY, HF_TOKEN. Variables that are set already win, as with `uv run
--env-file`.
"""

import io
from collections.abc import MutableMapping
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from beamline.protocol.errors import ConfigError

VARIABLE = "ENV_FILE"


def load_env_file(environment: MutableMapping[str, str]) -> None:
    """Add the variables of the file that ENV_FILE names, if it is set.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no `NAME=value`. No value is shown: it may be a secret.
    """
    path = environment.get(VARIABLE, "")
    if not path:
        return
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={path} in the environment cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{VARIABLE}={path} in the environment is not a text file") from None
    for line in parse_stream(io.StringIO(text)):
        if line.error or (line.key is not None and line.value is None):
            raise ConfigError(f"{path}, line {line.original.line}: not of the form NAME=value")
    for name, value in dotenv_values(stream=io.StringIO(text)).items():
        environment.setdefault(name, value or "")
