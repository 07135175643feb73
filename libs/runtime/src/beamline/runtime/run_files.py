"""The run's folder as every service knows it: the resolved configuration, and where logs and credentials lie."""

from pathlib import Path

import msgspec

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError


def run_dir(config: RunConfig) -> Path:
    """`<run.dir>/<run.name>`, absolute."""
    return (Path(config.run.dir) / config.run.name).resolve()


def write_config(run_dir: Path, config: RunConfig) -> Path:
    """Write the resolved configuration to `<run_dir>/config.json` and return its path."""
    path = run_dir / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".json.draft")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    draft.replace(path)
    return path


def read_config(run_dir: Path) -> RunConfig:
    """Read what `write_config` wrote. Raises ConfigError when it is missing or of another version of Beamline."""
    path = run_dir / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: start the run with `beamline run`, which writes it") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}: start the run anew with `beamline run`") from None
