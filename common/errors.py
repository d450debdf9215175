"""Errors that PageWeaver raises by name."""

from __future__ import annotations


class UnsupportedDeviceError(RuntimeError):
    """The requested backend cannot run here.

    Raised when compiled kernels are missing from this build or the device is not one that they run on. The
    message says what is missing and how to get it. Nothing falls back silently: a caller who wants the
    reference asks for ``backend="reference"``.
    """
