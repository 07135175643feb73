"""What the trainer's libraries read from the environment, set before they are loaded."""

import os

SPIN_COUNT = 1000
"""Some microseconds. OpenMP's threads spin at every barrier, for milliseconds by default: when another process has one
of the cores, that makes a train step on two threads thirty times slower."""


def prepare() -> None:
    """Call before the first import of torch. What the user has set stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
