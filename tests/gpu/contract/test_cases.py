"""Cases C16 to C24 on the kernels."""

from ...test_cases import *  # noqa: F403
