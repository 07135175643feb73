"""What goes wrong with optimizer state on a disk, as Beamline's own errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from beamline.diskoptim.errors import DirectoryError, DiskOptimError, StateError
from beamline.protocol.errors import BeamlineError, ConfigError, WeightError


@contextmanager
def state_errors() -> Iterator[None]:
    """WeightError for damaged or foreign state, ConfigError for a directory that cannot be used; texts stay."""
    try:
        yield
    except StateError as error:
        raise WeightError(f"optimizer state: {error}") from error
    except DirectoryError as error:
        raise ConfigError(f"optimizer state: {error}") from error
    except DiskOptimError as error:
        raise BeamlineError(f"optimizer state: {error}") from error
