"""Workspaces and schedules on the kernels."""

from ...test_schedules import TestSchedules, TestWorkspaces  # noqa: F401
