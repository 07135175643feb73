"""Fixtures of more than one area."""

import gc
from collections.abc import Callable

import pytest


def pytest_collection() -> None:
    """Test files import whole engines, all of which stay: the collector does not walk them while they come."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor later, nor in the processes that are forked off this one."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def is_documented() -> Callable[[str], bool]:
    """Whether the metric schema, from which docs/metrics.md is made, describes a metric."""
    from beamline.protocol.metric_schema import find  # not every interpreter that runs tests has our protocol

    return lambda name: find(name) is not None
