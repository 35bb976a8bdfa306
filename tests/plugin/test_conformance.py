"""What a third party writes to test its backend; FewWorlds only saves time here."""

from dist_checkpointing.testing import StrategyConformance
from few_worlds import FewWorlds


class TestNpy(FewWorlds, StrategyConformance):
    backend = ("npy", 1)
