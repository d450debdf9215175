"""Bits and query ids on the kernels."""

from ...test_strategies import TestBits, TestQueryIds  # noqa: F401
