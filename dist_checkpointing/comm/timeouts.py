"""How long ranks wait for each other, where nobody says."""

from __future__ import annotations

import math
import os
from typing import Final

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
_LONGEST_SECONDS: Final = 1e9
TIMEOUT_VARIABLE: Final = "DIST_CHECKPOINTING_TIMEOUT_SECONDS"


def default_timeout_seconds() -> float:
    """What the environment variable says, or half an hour.

    Raises:
        ValueError: if it says no number of seconds above 0.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    require_timeout(seconds, f"the environment variable {TIMEOUT_VARIABLE}", text)
    return seconds


def require_timeout(seconds: float, name: str, text: str | None = None) -> None:
    """Refuse what no clock of torch can count.

    Args:
        seconds: to check.
        name: of the setting.
        text: as it was given, if that was not a number.

    Raises:
        ValueError: if it is not a number of seconds above 0.
    """
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{name} must be a number of seconds above 0, and at most {_LONGEST_SECONDS:g}, "
            f"not {seconds if text is None else text!r}"
        )
