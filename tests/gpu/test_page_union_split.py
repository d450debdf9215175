"""page_union in two E4M3 parts on Hopper: what its single parts are asked, with the tolerances of BF16.

Its partials are stored in BF16, which costs 0.17% of the 0.3% that are allowed.
"""

from __future__ import annotations

import pytest

from ..helpers import Target
from .hopper import PAGE_SPLIT_TARGETS, WATCHDOG, missing
from .test_page_union import TestPartials  # noqa: F401
from .test_union_accuracy import TestAccuracy, TestOnes, test_huge_logits  # noqa: F401
from .test_union_graphs import TestC36Graphs  # noqa: F401
from .test_union_split import (  # noqa: F401
    test_both_arithmetics_take_turns,
    test_outliers,
    test_peaked,
    test_powers_of_two,
)

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]


@pytest.fixture(params=PAGE_SPLIT_TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen
