"""Fixtures of more than one area."""

from collections.abc import Callable

import pytest


@pytest.fixture
def is_documented() -> Callable[[str], bool]:
    """Whether the metric schema, from which docs/metrics.md is made, describes a metric."""
    from beamline.protocol.metric_schema import find  # not every interpreter that runs tests has our protocol

    return lambda name: find(name) is not None
