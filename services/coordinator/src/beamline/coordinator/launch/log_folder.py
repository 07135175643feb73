"""Where a run's logs lie: in its folder, or in LOG_PATH's, to which `logs` in its folder is then a link."""

from pathlib import Path

from beamline.protocol.errors import ConfigError


def place_logs(run_dir: Path, log_path: str) -> None:
    """Make the folder of the logs; those of a run that goes on are added to.

    Raises:
        ConfigError: it cannot be made, holds the logs of another run, or is not where the earlier part has its own.
    """
    link = run_dir / "logs"
    if link.is_symlink() and not link.exists():
        link.unlink()
    folder = Path(log_path).resolve() if log_path else link
    if link.exists():
        if link.resolve() != folder.resolve():
            raise ConfigError(f"run.log_path={log_path}: the run that goes on has its logs in {link.resolve()}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(folder.glob("*.log"))
    except OSError as error:
        raise ConfigError(f"run.log_path={log_path} cannot be a folder for logs: {error.strerror}") from None
    if foreign:
        raise ConfigError(f"run.log_path={log_path} holds logs of another run, such as {foreign[0].name}: use another")
    if log_path:
        link.symlink_to(folder, target_is_directory=True)


def remove_logs(run_dir: Path) -> None:
    """Remove the logs that lie elsewhere, and the link to them."""
    link = run_dir / "logs"
    if link.is_symlink():
        for path in link.glob("*.log"):
            path.unlink()
        link.unlink()
