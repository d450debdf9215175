"""Settings and fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("tests.helpers", "tests.report_rows")

from .helpers import REFERENCE_TARGETS, Target  # noqa: E402  (after its asserts were registered)

# A shared, slow or busy machine must not fail a property by its clock.
settings.register_profile("pageweaver", deadline=None, print_blob=True)
settings.load_profile("pageweaver")

# Thousands of small operations: threads only wait for each other, and for long on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture(params=REFERENCE_TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """Every strategy's reference backend on the CPU; tests/gpu overrides it with the kernels."""
    chosen: Target = request.param
    return chosen


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread and two, for what must not depend on how work is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
