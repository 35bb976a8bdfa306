"""A backend of a third party, found through its entry points, opened like ours."""

from __future__ import annotations

from pathlib import Path

import torch

from dist_checkpointing import Checkpoint, ShardedTensor, save, verify_checkpoint
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
