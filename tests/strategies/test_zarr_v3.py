"""("zarr", 2): zarr v3, raw and with every codec."""

from pathlib import Path

import pytest

from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from dist_checkpointing.testing import Failures, StrategyConformance
from few_worlds import FewWorlds


class TestZarrV3(StrategyConformance):
    backend = ("zarr", 2)


class Coded(FewWorlds):
    backend = ("zarr", 2)
    codec = ""

    def save_strategy(self) -> Zarr3SaveShardedStrategy:
        return Zarr3SaveShardedStrategy(codec=self.codec)


class TestZarrV3Zstd(Coded, Failures):
    codec = "zstd"


@pytest.mark.parametrize("codec", ["gzip", "blosc"])
def test_other_codecs(tmp_path: Path, codec: str) -> None:
    """What is read, once it is decompressed, is the same for all codecs."""
    suite = Coded()
    suite.codec = codec
    suite.test_every_dtype_bit_for_bit(tmp_path, 2)
