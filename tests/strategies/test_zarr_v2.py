"""("zarr", 1): zarr v2 as Megatron writes it."""

from dist_checkpointing.testing import StrategyConformance
from few_worlds import FewWorlds


class TestZarrV2(FewWorlds, StrategyConformance):
    backend = ("zarr", 1)
    # Keys are folder names as they are: that is the format, and so is passing over *.sync.
    refused_keys = frozenset({"k" * 300, "metadata.json", "common.pt", "layers/optimizer.sync"})
