"""A database that an earlier release wrote with TensorStore, one a rank and merged, loads exactly.

``dc0_tensorstore.expected.json`` says what it holds, and what the checkpoints of format 1.0 hold.
"""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.testing import assert_same_bits, run_ranks
from ocdbt_databases import read_by_tensorstore
from states import between, cell, shard

GOLDEN = Path(__file__).parents[1] / "golden" / "dc0_tensorstore"
FORMAT_1 = [f"format1.0_{name}" for name in ("tensorstore", "zarr2", "zarr1", "torch_dist")]
ALPHA = "norm/\N{GREEK SMALL LETTER ALPHA}"
EXPECTED = json.loads(GOLDEN.with_suffix(".expected.json").read_text())


def full(key: str) -> torch.Tensor:
    told = EXPECTED["tensors"][key]
    dtype = getattr(torch, told["dtype"])
    if not told["hex"]:
        return torch.empty(told["shape"], dtype=dtype)
    data = torch.frombuffer(bytearray.fromhex(told["hex"]), dtype=torch.uint8)
    return data.view(dtype).reshape(told["shape"])


def part_of(key: str, rank: int, count: int) -> dc.ShardedTensor:
    """What this rank has of a tensor of which each has as many rows as fit."""
    whole = full(key)
    if not whole.ndim:
        return shard(key, whole, replica_id=rank)
    most = -(-len(whole) // count)
    start, stop = (min(most * number, len(whole)) for number in (rank, rank + 1))
    return between(key, whole, start, stop)


def assert_holds(folder: Path, keys: set[str]) -> None:
    checkpoint = dc.Checkpoint.open(folder)
    assert set(checkpoint) == keys
    for key in keys:
        assert_same_bits(checkpoint[key][...], full(key), key)
    cells = checkpoint.objects["rng"]
    assert [cells[number] for number in range(2)] == EXPECTED["objects"]["rng"]
    assert checkpoint.common["step"] == EXPECTED["common"]["step"]


@pytest.mark.parametrize("name", [GOLDEN.name, *FORMAT_1])
def test_it_holds_what_was_saved(name: str) -> None:
    assert_holds(GOLDEN.parent / name, set(EXPECTED["tensors"]))
    dc.verify_checkpoint(GOLDEN.parent / name)


def test_what_is_removed_from_it_gives_its_space_back(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(GOLDEN, folder)
    dc.remove_sharded_tensors(folder, "optimizer")
    kept = {key for key in EXPECTED["tensors"] if not key.startswith("optimizer")}
    assert_holds(folder, kept)
    dc.verify_checkpoint(folder)
    assert not (folder / "data/optimizer").exists()
    assert len(list((folder / "d").iterdir())) == 1


def test_we_write_the_same_keys_and_values(tmp_path: Path) -> None:
    """So that TensorStore, and releases of that time, read what is written now."""
    keys = {"layers.0.weight", "layers.0.bias", "edge", "scalar", ALPHA, "dtypes.bfloat16"}

    def save_rank(comm: Comm) -> None:
        state: dict[str, Any] = {key: part_of(key, comm.rank, 2) for key in sorted(keys)}
        rng = cell("rng", EXPECTED["objects"]["rng"][comm.rank], comm)
        dc.save({**state, "rng": rng}, tmp_path / "c", comm=comm)

    run_ranks(2, save_rank)
    ours, theirs = (read_by_tensorstore(folder) for folder in (tmp_path / "c", GOLDEN))
    assert {key.partition(b"/")[0] for key in ours} == {
        quote(key, safe="").encode() for key in (*keys, "rng")
    }
    assert ours == {key: theirs[key] for key in ours}
    # Two chunks of all but the scalar, a description of each, and two cells.
    assert len(ours) == 5 * 2 + 1 + 6 + 2
