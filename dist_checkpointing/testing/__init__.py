"""For tests: ranks simulated by threads, and the conformance suite for backends."""

import importlib
import sys
import typing

from dist_checkpointing.testing.simulated_ranks import run_ranks as run_ranks

if typing.TYPE_CHECKING:
    from dist_checkpointing.testing.conformance import *  # noqa: F403 - for type checkers alone
else:

    def __getattr__(name: str) -> typing.Any:
        # Imported on first use, so that run_ranks works without pytest.
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        suite = f"{__name__}.conformance"
        if suite not in sys.modules:
            import pytest  # noqa: PLC0415

            # Without this, a failing assert in the suite would not show the values it compared.
            pytest.register_assert_rewrite(suite)
        return getattr(importlib.import_module(suite), name)
