"""PageWeaver: query unions over paged KV for sparse attention prefill."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("pageweaver")
