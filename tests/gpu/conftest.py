"""On what the tests of kernels run."""

from __future__ import annotations

import pytest

from ..helpers import Target
from .hopper import TARGETS


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """Every union strategy and mapping on the GPU."""
    chosen: Target = request.param
    return chosen


@pytest.fixture
def peers() -> tuple[Target, ...]:
    """Targets whose bits have to be the same."""
    return TARGETS
