"""For tests: ranks simulated by threads, and the conformance suite for backends."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dist_checkpointing.testing.simulated_ranks import run_ranks

if TYPE_CHECKING:
    from dist_checkpointing.testing.conformance import StrategyConformance

__all__ = ["StrategyConformance", "run_ranks"]

_SUITE = f"{__name__}.conformance"


def __getattr__(name: str) -> Any:
    # Imported on first use, so that run_ranks works without pytest.
    if name != "StrategyConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _SUITE not in sys.modules:
        import pytest  # noqa: PLC0415

        # Without this, a failing assert in the suite would not show the values that it compared.
        pytest.register_assert_rewrite(_SUITE)
    from dist_checkpointing.testing.conformance import StrategyConformance  # noqa: PLC0415

    return StrategyConformance
