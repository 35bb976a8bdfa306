"""("zarr", 2): zarr v3, raw and compressed; all codecs: test_damaged_files, test_open_with_zarr."""

from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import Failures, StrategyConformance
from few_worlds import FewWorlds


class TestZarrV3(StrategyConformance):
    backend = ("zarr", 2)


class TestZarrV3Zstd(FewWorlds, Failures):
    backend = ("zarr", 2)

    def save_strategy(self) -> Zarr3SaveShardedStrategy:
        return Zarr3SaveShardedStrategy(codec="zstd")
