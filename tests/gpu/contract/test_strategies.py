"""Bits, workspaces, schedules and query ids on the kernels."""

from ...test_strategies import (  # noqa: F401
    TestBits,
    TestQueryIds,
    TestSchedules,
    TestWorkspaces,
)
