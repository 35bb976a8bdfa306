"""("torch_dist", 1): the files of torch DCP."""

from dist_checkpointing.testing import StrategyConformance


class TestTorchDist(StrategyConformance):
    backend = ("torch_dist", 1)
