"""A backend of a third party, found through its entry points, opened like ours."""

from pathlib import Path

import torch

from dist_checkpointing import Checkpoint, save, verify_checkpoint
from dist_checkpointing.tools import convert as conversions
from states import flat, shard


def test_it_is_opened_and_sliced_and_converted(tmp_path: Path) -> None:
    full = torch.arange(40.0).reshape(8, 5)
    parts = [shard("w", full.chunk(4)[i], (0, i, 4)) for i in range(4)]
    pieces = [flat("flat", full, 0, 13), flat("flat", full, 13, 40)]
    save({"rows": parts, "flat": pieces, "step": 1}, tmp_path / "c", "npy")
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.backend == ("npy", 1)
    assert list(checkpoint) == ["flat", "w"]
    assert len(checkpoint["w"].chunks) == 4
    for key in checkpoint:
        assert torch.equal(checkpoint[key][1:7, ::2], full[1:7, ::2])
    verify_checkpoint(tmp_path / "c")
    # It is converted from and to as any other.
    conversions.convert(tmp_path / "c", tmp_path / "away", "tensorstore")
    conversions.convert(tmp_path / "away", tmp_path / "back", "npy")
    for name in ("c", "away", "back"):
        found = Checkpoint.open(tmp_path / name)
        assert all(torch.equal(found[key][...], full) for key in ("w", "flat"))
        assert found.common == {"step": 1}
