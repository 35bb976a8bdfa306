"""("torch_dist", 1): the files of torch DCP."""

from __future__ import annotations

from dist_checkpointing.testing import StrategyConformance


class TestTorchDist(StrategyConformance):
    backend = ("torch_dist", 1)
