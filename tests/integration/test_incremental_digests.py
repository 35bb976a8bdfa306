"""What is hashed and summed in a save with a base is what a full save hashes and sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import Checkpoint, fingerprint, save, verify_checkpoint
from dist_checkpointing.storage import fingerprints
from dist_checkpointing.storage.fingerprints import sums_of_tensor
from states import wholes


def num_shared(folder: Path) -> int:
    return sum(path.is_file() and path.stat().st_nlink > 1 for path in folder.rglob("*"))


@pytest.mark.parametrize("backend", [("tensorstore", 1), ("zarr", 2)])
def test_fingerprints_are_those_of_a_full_save(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shared is summed too; what is compared and then written is summed once."""
    tensors = {
        **{f"layer{i}.w": torch.randn(40, 64) for i in range(8)},
        "large": torch.randn(600, 500),
        "frozen": torch.randn(600, 500),
    }
    save(wholes(tensors), tmp_path / "1", backend)
    tensors["layer3.w"] += 1
    tensors["large"][-1, -1] += 1  # which is seen only when all of it is hashed
    summed: list[int] = []
    own = sums_of_tensor

    def counting(values: torch.Tensor, *rest: Any) -> Any:
        summed.append(values.numel())
        return own(values, *rest)

    monkeypatch.setattr(fingerprints, "sums_of_tensor", counting)
    save(wholes(tensors), tmp_path / "2", backend, base=tmp_path / "1", fingerprints=True)
    assert sorted(summed) == sorted(tensor.numel() for tensor in tensors.values())
    assert num_shared(tmp_path / "2")
    opened = Checkpoint.open(tmp_path / "2")
    assert {key: opened.fingerprint(key) for key in tensors} == fingerprint(wholes(tensors))
    verify_checkpoint(tmp_path / "2")


def test_small_values_beside_shared_ones(tmp_path: Path) -> None:
    """Digests made for the comparison, and those made on writing, are those of a full save."""
    sizes = (0, 1, 3, 30, 60, 61, 100, 3000)
    tensors = {f"w{i}.{size}": torch.randn(size) for size in sizes for i in range(20)}
    save(wholes(tensors), tmp_path / "1")
    changed = {key: tensor + (key[1:3] == "7.") for key, tensor in tensors.items()}
    save(wholes(changed), tmp_path / "2", base=tmp_path / "1")
    save(wholes(changed), tmp_path / "full")
    assert num_shared(tmp_path / "2")
    verify_checkpoint(tmp_path / "2")
    for end in ("bin", "upper"):
        name = f".dckpt/checksums/00000.{end}"
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "full" / name).read_bytes()
