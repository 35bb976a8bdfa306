"""A third party's backend is converted from and to as any other."""

from __future__ import annotations

from pathlib import Path

import torch

from dist_checkpointing import Checkpoint, save
from dist_checkpointing.tools import convert as conversions
from states import shard


def test_there_and_back(tmp_path: Path) -> None:
    full = torch.arange(24.0).reshape(6, 4)
    leaves = [shard("w", full[i * 3 : i * 3 + 3], (0, i, 2)) for i in (0, 1)]
    save({"leaves": leaves, "step": 3}, tmp_path / "source")
    assert "npy:1" in conversions.targets()
    conversions.convert(tmp_path / "source", tmp_path / "npy", "npy")
    conversions.convert(tmp_path / "npy", tmp_path / "back", "tensorstore")
    back = Checkpoint.open(tmp_path / "back")
    assert torch.equal(back["w"][...], full)
    assert back.common == {"step": 3}
