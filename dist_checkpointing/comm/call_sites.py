"""Which call of a user led here: for ranks that find out that they do not make the same one."""

from __future__ import annotations

import traceback
from typing import Final

_PACKAGE: Final = __name__.partition(".")[0]
_SIMULATION: Final = f"{_PACKAGE}.testing"


def call_site() -> str | None:
    """The function of this library that was called from outside, and where; None for a thread."""
    called = None
    for frame, line in traceback.walk_stack(None):
        module = frame.f_globals.get("__name__", "")
        if module == "contextlib":
            continue
        if module.partition(".")[0] == _PACKAGE and not module.startswith(_SIMULATION):
            called = frame.f_code.co_qualname
        elif called is not None:
            is_user = module != "threading"
            return f"{called} ({frame.f_code.co_filename}:{line})" if is_user else None
    return None


def described(label: str, failure: str | None = None) -> str:
    """What this rank does, in the words of an error.

    Args:
        label: of the step.
        failure: what went wrong in it on this rank.
    """
    site = call_site()
    text = f"calls {site}, and is at {label}" if site is not None else f"is at {label}"
    return f"{text}, which failed: {failure}" if failure is not None else text
