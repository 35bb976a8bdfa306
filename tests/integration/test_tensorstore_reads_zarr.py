"""``sharded_strategy="tensorstore"`` on zarr checkpoints: the same values, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import CorruptCheckpointError, ShardedObject, ShardedTensor, load, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.strategies import TensorStoreLoadShardedStrategy, Zarr3SaveShardedStrategy
from dist_checkpointing.testing import assert_same_bits, random_bits, run_ranks
from states import between, blanks, flat, shard, wholes

CODECS = [("zarr", 1), ("zarr", 2), "zstd", "gzip", "blosc"]


def strategy(name: Any) -> Any:
    return Zarr3SaveShardedStrategy(codec=name) if isinstance(name, str) else name


def full(rows: int = 12) -> torch.Tensor:
    return torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5)


def state(rank: int, world: int) -> dict[str, Any]:
    even = [12 * r // world for r in range(world + 1)]
    uneven = [0, *range(3, 3 + world - 1), 12]
    edges = [0, *range(7, 7 + world - 1), 60]
    return {
        "even": shard("even", full()[even[rank] : even[rank + 1]].clone(), (0, rank, world)),
        "uneven": between("uneven", full(), *uneven[rank : rank + 2]),
        "flat": flat("flat", full(), *edges[rank : rank + 2]),
        "scalar": shard("scalar", torch.tensor(3.5), replica_id=rank),
        "object": ShardedObject("object", {"rank": 0}, (1,), (0,), replica_id=rank),
    }


@pytest.mark.parametrize(("name", "ranks"), [*zip(CODECS, [3, 1, 3, 1, 3], strict=True)], ids=str)
def test_every_cut_loads_exactly(tmp_path: Path, name: Any, ranks: int) -> None:
    run_ranks(2, lambda comm: save(state(comm.rank, 2), tmp_path, strategy(name), comm=comm))

    def load_rank(comm: Comm) -> None:
        template, want = state(comm.rank, ranks), state(comm.rank, ranks)
        for key, leaf in template.items():
            leaf.data = None if key == "object" else leaf.data.fill_(-1)
        # An uneven cut of rows, wanted by columns: a part of many chunks.
        template["columns"] = ShardedTensor(
            "uneven", None, torch.float32, (12, 2), (12, 5), (0, 2), None
        )
        loaded = load(template, tmp_path, "tensorstore", comm=comm)
        assert torch.equal(loaded["columns"], full()[:, 2:4])
        assert loaded["object"] == {"rank": 0}
        for key in ("even", "uneven", "flat", "scalar"):
            assert torch.equal(loaded[key], want[key].data), key
            assert loaded[key] is template[key].data

    run_ranks(ranks, load_rank)


@pytest.mark.parametrize("version", [1, 2])
def test_every_dtype_keeps_its_bits(tmp_path: Path, version: int) -> None:
    full = {row.name: random_bits((4, 3), row.torch) for row in DTYPES}
    save(wholes(full), tmp_path, ("zarr", version))
    loaded = load(blanks(full), tmp_path, TensorStoreLoadShardedStrategy())
    for key, tensor in full.items():
        assert_same_bits(loaded[key], tensor, key)


@pytest.mark.parametrize("name", CODECS, ids=str)
def test_a_lost_chunk_is_named_and_never_zeros(tmp_path: Path, name: Any) -> None:
    save({"w": shard("w", full())}, tmp_path, strategy(name))
    chunk = next(p for p in (tmp_path / "w").iterdir() if p.name in ("0.0", "c.0.0"))
    chunk.unlink()
    with pytest.raises(CorruptCheckpointError) as caught:
        load({"w": shard("w", full())}, tmp_path, "tensorstore")
    assert caught.value.findings[0].key == "w"
    assert caught.value.findings[0].path == str(chunk)
