"""All that a third party writes to test its backend."""

from __future__ import annotations

from dist_checkpointing.testing import StrategyConformance


class TestNpy(StrategyConformance):
    backend = ("npy", 1)
