"""("tensorstore", 1): zarr v3 arrays in an OCDBT database."""

from dist_checkpointing.testing import StrategyConformance


class TestTensorStore(StrategyConformance):
    backend = ("tensorstore", 1)
