"""For tests: ranks simulated by threads, and the conformance suite for backends."""
# ruff: noqa: F403, F405 - a star for type checkers alone

import importlib
import sys
import typing

from dist_checkpointing.testing.simulated_ranks import run_ranks

__all__ = [
    "CUTS",
    "CUT_SHAPE",
    "Contents",
    "Failures",
    "RoundTrips",
    "StorageProtocol",
    "StrategyConformance",
    "assert_same_bits",
    "data_of",
    "failures_on",
    "observed",
    "poisoned",
    "random_bits",
    "run_ranks",
    "template",
]

if typing.TYPE_CHECKING:
    from dist_checkpointing.testing.conformance import *
else:

    def __getattr__(name: str) -> typing.Any:
        # Imported on first use, so that run_ranks works without pytest.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        suite = f"{__name__}.conformance"
        if suite not in sys.modules:
            import pytest  # noqa: PLC0415

            # Without this, a failing assert in the suite would not show the values it compared.
            pytest.register_assert_rewrite(suite)
        return getattr(importlib.import_module(suite), name)
