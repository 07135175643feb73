"""What a run may leave in /dev/shm, and its removal."""

from pathlib import Path


def sweep(run_dir: Path) -> None:
    """Remove the run's shared memory: blobs and weights."""
