"""Launch choices of the per-query kernel; importable without Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["Tuning"]

_SUPPORTED = {
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "tokens": (32, 64, 128),
    "pairs": (False, True),
}


@dataclass(frozen=True)
class Tuning:
    """How the kernel runs; results agree within rounding, whatever is chosen.

    Attributes
    ----------
    num_warps : int
        Warps of a program: 2, 4 or 8.
    num_stages : int
        Depth of the software pipeline of page loads, 1 to 4; 1 loads nothing ahead.
    tokens : int
        Keys of one step: 32, 64 or 128; at most a page.
    pairs : bool
        Read FP8 values two dimensions at a time, as one 16-bit element. Shared memory is read transposed for
        the second product, which hardware does for 16-bit elements only; with False each byte is read alone,
        as a plain kernel does it.
    """

    num_warps: int = 2
    num_stages: int = 3
    tokens: int = 64
    pairs: bool = True

    def __post_init__(self) -> None:
        for name, supported in _SUPPORTED.items():
            if getattr(self, name) not in supported:
                raise ValueError(f"tune[{name!r}]: got {getattr(self, name)!r}, supported: {supported}")

    @classmethod
    def of(cls, tune: Mapping[str, int] | None) -> Tuning:
        """The defaults with the entries of `tune` in their place.

        Raises
        ------
        ValueError
            An unknown entry or value; the supported ones are named.
        """
        names = tuple(field.name for field in fields(cls))
        for name in tune or {}:
            if name not in names:
                raise ValueError(f"tune: got {name!r}, supported: {names}")
        return cls(**dict(tune or {}))  # type: ignore[arg-type]
