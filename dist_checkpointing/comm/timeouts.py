"""How long ranks wait for each other, where nobody says."""

from __future__ import annotations

import math
import os
from typing import Final

DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
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
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"the environment variable {TIMEOUT_VARIABLE} must be a number of seconds above 0, "
            f"not {text!r}"
        )
    return seconds
