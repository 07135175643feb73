"""Weights that a test exports are gone after it."""

from collections.abc import Iterator

import pytest

from rollout_messages import close_owners


@pytest.fixture(autouse=True)
def exported_weights() -> Iterator[None]:
    yield
    close_owners()
