"""Cases C25 to C49 on the kernels."""

from ...test_cases_calls import *  # noqa: F403
