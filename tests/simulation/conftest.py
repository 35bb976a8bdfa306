"""For tests in simulated worlds."""

import gc
import importlib
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """Nothing is imported in a world, and what is there already is no garbage of it."""
    for name in ("tensorstore", "zarr", "torch_dist"):
        importlib.import_module(f"dist_checkpointing.strategies.{name}")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
