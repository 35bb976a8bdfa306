"""How chunks are compressed: by the size of their elements."""

import json
from pathlib import Path

import pytest
import torch

from dist_checkpointing import load, save
from dist_checkpointing.mapping import DTYPES, DType
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy
from states import shard

BLOSC_TYPESIZE = 3
"""The byte of Blosc's header that says which bytes were shuffled together."""


def saved(folder: Path, tensor: torch.Tensor) -> bytes:
    """The one chunk of the tensor, as Blosc has written it."""
    state = {"w": shard("w", tensor)}
    save(state, folder, Zarr3SaveShardedStrategy(codec="blosc"))
    return (folder / "w" / "c.0").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=[dtype.name for dtype in DTYPES])
def test_blosc_shuffles_by_the_size_of_an_element(tmp_path: Path, dtype: DType) -> None:
    chunk = saved(tmp_path, torch.zeros(1024, dtype=torch.uint8).view(dtype.torch))
    assert chunk[BLOSC_TYPESIZE] == dtype.itemsize
    node = json.loads((tmp_path / "w" / "zarr.json").read_text())
    assert node["codecs"][-1]["configuration"]["typesize"] == dtype.itemsize


def test_blosc_makes_a_float32_copy_of_bfloat16_much_smaller(tmp_path: Path) -> None:
    """Half of its bytes are zero, and only shuffling brings them together."""
    tensor = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert tensor.nbytes / len(saved(tmp_path, tensor)) > 2.6  # unshuffled: 2.3
    wanted = {"w": shard("w", torch.empty(2**20))}
    assert torch.equal(load(wanted, tmp_path)["w"], tensor)
