"""("torch_dist", 1): the files of torch DCP."""

from dist_checkpointing.testing import StrategyConformance
from few_worlds import FewWorlds


class TestTorchDist(FewWorlds, StrategyConformance):
    backend = ("torch_dist", 1)
