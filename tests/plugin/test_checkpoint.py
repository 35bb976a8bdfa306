"""A backend of a third party, found through its entry points, opened like ours."""

from pathlib import Path

import torch

from dist_checkpointing import Checkpoint, ShardedTensor, save, verify_checkpoint
from dist_checkpointing.tools import convert as conversions
from states import shard


def test_it_is_opened_and_sliced(tmp_path: Path) -> None:
    full = torch.arange(40.0).reshape(8, 5)
    rows = [shard("w", full.chunk(4)[i], (0, i, 4)) for i in range(4)]
    flat = [
        ShardedTensor.from_rank_offsets_flat(
            "flat", full.view(-1)[start:stop], (8, 5), flattened_range=slice(start, stop)
        )
        for start, stop in ((0, 13), (13, 40))
    ]
    save({"rows": rows, "flat": flat, "step": 1}, tmp_path / "c", "npy")
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.backend == ("npy", 1)
    assert list(checkpoint) == ["flat", "w"]
    assert len(checkpoint["w"].chunks) == 4
    for key in checkpoint:
        assert torch.equal(checkpoint[key][1:7, ::2], full[1:7, ::2])
    assert checkpoint.common == {"step": 1}
    verify_checkpoint(tmp_path / "c")


# A third party's backend is converted from and to as any other.


def test_there_and_back(tmp_path: Path) -> None:
    full = torch.arange(24.0).reshape(6, 4)
    leaves = [shard("w", full[i * 3 : i * 3 + 3], (0, i, 2)) for i in (0, 1)]
    save({"leaves": leaves, "step": 3}, tmp_path / "source")
    conversions.convert(tmp_path / "source", tmp_path / "npy", "npy")
    conversions.convert(tmp_path / "npy", tmp_path / "back", "tensorstore")
    back = Checkpoint.open(tmp_path / "back")
    assert torch.equal(back["w"][...], full)
    assert back.common == {"step": 3}
