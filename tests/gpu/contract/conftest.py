"""The contract's cases on the kernels: the modules here collect them, this file says on what they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...helpers import Target
from ..hopper import (
    BF16_TARGETS,
    PAGE_SPLIT_TARGETS,
    PAGE_TARGETS,
    SPLIT_TARGETS,
    TARGETS,
    WATCHDOG,
    missing,
    use_bf16_caches,
)


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Skip where the kernels cannot run."""
    if reason := missing():
        pytest.skip(reason)


# Orders have no arithmetic of their own: one grouping is enough in the second one, and pairs run both kernels
# of page_union.
SPLIT = (*(target for target in SPLIT_TARGETS if target.strategy == "union8"), PAGE_SPLIT_TARGETS[0])


@pytest.fixture(params=(*TARGETS, *SPLIT, *BF16_TARGETS, *PAGE_TARGETS), ids=str)
def target(request: pytest.FixtureRequest, kernels: None, monkeypatch: pytest.MonkeyPatch) -> Target:
    chosen: Target = request.param
    if chosen.arithmetic == "bf16":
        use_bf16_caches(monkeypatch)
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that no target runs are about the host; they run where they are defined."""
    here = Path(__file__).parent
    on_host = []
    for item in items:
        if isinstance(item, pytest.Function) and here in item.path.parents:
            item.add_marker(WATCHDOG)
            if "target" not in item.fixturenames:
                on_host.append(item)
    config.hook.pytest_deselected(items=on_host)
    items[:] = [item for item in items if item not in on_host]
