"""The one door to the compiled modules ``pageweaver._native`` and ``pageweaver._cuda``."""

from __future__ import annotations

import importlib
from types import ModuleType

from pageweaver.common.errors import UnsupportedDeviceError

_BUILD_HINT = "build it from the repository root with `make venv` or `pip install .` (needs a C++17 compiler)"


def load_native() -> ModuleType:
    """Return the C++ module ``pageweaver._native``.

    Raises
    ------
    ImportError
        The module is missing or does not load; the text says how to build it.
    """
    try:
        return importlib.import_module("pageweaver._native")
    except ImportError as error:
        raise ImportError(f"pageweaver._native does not load ({error}); {_BUILD_HINT}") from error


def load_cuda() -> ModuleType:
    """Return the module of Hopper kernels, ``pageweaver._cuda``.

    Loading needs neither a GPU nor a driver; whether a device can run the kernels is the caller's check.

    Raises
    ------
    UnsupportedDeviceError
        The module was not built or does not load; the text says which, and why.
    """
    built, reason = cuda_status()
    if not built:
        raise UnsupportedDeviceError(
            f"pageweaver._cuda is not available: {reason}; the reference backend runs without it"
        )
    return importlib.import_module("pageweaver._cuda")


def cuda_status() -> tuple[bool, str]:
    """Say whether ``pageweaver._cuda`` was built and loads.

    Returns
    -------
    tuple[bool, str]
        Whether it can be used, and the reason or the build's description in words.
    """
    try:
        info = importlib.import_module("pageweaver._build_info")
    except ImportError:
        return False, f"the compiled part of pageweaver is not installed; {_BUILD_HINT}"
    if not info.BUILT_CUDA:
        return False, str(info.CUDA_REASON)
    try:
        importlib.import_module("pageweaver._cuda")
    except ImportError as error:
        return False, f"it was built but does not load ({error})"
    return True, str(info.CUDA_REASON)
