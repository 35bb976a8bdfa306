"""How chunks are compressed: by the size of their elements."""

import json
from pathlib import Path

import pytest
import torch

from dist_checkpointing import save
from dist_checkpointing.mapping import DTYPES, DType
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from states import shard


@pytest.mark.parametrize("dtype", DTYPES, ids=[dtype.name for dtype in DTYPES])
def test_blosc_shuffles_by_the_size_of_an_element(tmp_path: Path, dtype: DType) -> None:
    """A float32 copy of bfloat16 is half zeros, which only shuffling brings together."""
    state = {"w": shard("w", torch.zeros(1024, dtype=torch.uint8).view(dtype.torch))}
    save(state, tmp_path, Zarr3SaveShardedStrategy(codec="blosc"))
    flags, typesize = (tmp_path / "w" / "c.0").read_bytes()[2:4]
    assert typesize == dtype.itemsize
    assert flags & 1  # bytes are shuffled
    node = json.loads((tmp_path / "w" / "zarr.json").read_text())
    assert node["codecs"][-1]["configuration"]["typesize"] == dtype.itemsize
