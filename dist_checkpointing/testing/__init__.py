"""For tests: ranks simulated by threads, and the conformance suite for backends."""

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
    from dist_checkpointing.testing.conformance import StrategyConformance
    from dist_checkpointing.testing.conformance.backend_hooks import failures_on, observed
    from dist_checkpointing.testing.conformance.calls_and_failures import Failures, StorageProtocol
    from dist_checkpointing.testing.conformance.contents import Contents, RoundTrips
    from dist_checkpointing.testing.conformance.sample_shards import (
        CUT_SHAPE,
        CUTS,
        assert_same_bits,
        data_of,
        poisoned,
        random_bits,
        template,
    )
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
        parts = ("", ".backend_hooks", ".calls_and_failures", ".contents", ".sample_shards")
        modules = [vars(importlib.import_module(suite + part)) for part in parts]
        return next(names[name] for names in modules if name in names)
