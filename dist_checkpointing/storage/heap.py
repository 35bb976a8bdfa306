"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache


def give_back_freed() -> None:
    """Let the system have what was freed; nothing happens where the C library cannot do that.

    glibc keeps the small blocks of a thread for that thread. Hundreds of thousands of them, freed
    by one thread after the other, would add up instead of being used again.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
