"""Small values: read straight into many tensors, and compared there with their checksums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.strategies.chunk_reads import read_scattered


def _addresses(arrays: list[Any]) -> Any:
    return np.array([array.ctypes.data for array in arrays], dtype=np.int64)


def _file(path: Path, num_bytes: int) -> tuple[int, bytes]:
    content = np.random.default_rng(3).bytes(num_bytes)
    path.write_bytes(content)
    return os.open(path, os.O_RDONLY), content


@pytest.mark.parametrize("is_short", [False, True])
def test_values_arrive_each_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    sizes = np.array([5, 1, 0, 300, 5] * 700, dtype=np.int64)
    starts = 11 + np.cumsum(sizes) - sizes
    starts[1000:] += 40  # a gap
    descriptor, content = _file(tmp_path / "data", int(starts[-1] + sizes[-1]))
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes.tolist()]
    if is_short:
        whole = os.preadv

        def some(descriptor: int, buffers: list[Any], position: int) -> int:
            return whole(descriptor, buffers[: len(buffers) // 2 + 1], position)

        monkeypatch.setattr(os, "preadv", some)
    try:
        assert read_scattered(descriptor, starts, sizes, _addresses(arrays))
    finally:
        os.close(descriptor)
    for array, start in zip(arrays, starts.tolist(), strict=True):
        assert array.tobytes() == content[start : start + len(array)]


def test_a_file_that_ends_early_is_noticed(tmp_path: Path) -> None:
    descriptor, _ = _file(tmp_path / "data", 99)
    arrays = [np.zeros(50, dtype=np.uint8) for _ in range(2)]
    sizes = np.array([50, 50])
    try:
        with pytest.raises(EOFError):
            read_scattered(descriptor, np.array([0, 50]), sizes, _addresses(arrays))
    finally:
        os.close(descriptor)


def _state(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}


def test_memory_that_two_leaves_share_is_noticed(tmp_path: Path) -> None:
    values = {f"w{number}": torch.full((64,), float(number)) for number in range(4)}
    save(_state(values), tmp_path / "c")
    shared = torch.zeros(64)
    targets = {key: shared if key in ("w1", "w2") else torch.zeros(64) for key in values}
    with pytest.raises(CheckpointingException, match="memory of its own"):
        load(_state(targets), tmp_path / "c", verify=True)


def test_the_leaves_of_a_template_stay_as_they_are(tmp_path: Path) -> None:
    values = {f"w{number}": torch.full((64,), float(number)) for number in range(4)}
    save(_state(values), tmp_path / "c")
    template = _state({key: torch.zeros(64) for key in values})
    template["w3"].data = None
    before = {key: dict(vars(leaf)) for key, leaf in template.items()}
    loaded = load(template, tmp_path / "c")
    assert {key: dict(vars(leaf)) for key, leaf in template.items()} == before
    assert loaded["w0"] is template["w0"].data
    assert torch.equal(loaded["w3"], values["w3"])
