"""How chunks are read. Any window of any chunk: integration/test_resharding_properties.py."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.filesystem import ranged_reads
from dist_checkpointing.filesystem.ranged_reads import open_file
from dist_checkpointing.format import Box, Window
from dist_checkpointing.storage import ReadMode, StorageOptions
from dist_checkpointing.strategies import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from dist_checkpointing.strategies.chunk_reads import read_scattered, read_window
from dist_checkpointing.threads import in_threads
from faults import replaced
from states import shard


@pytest.mark.parametrize("most_copied", [64, None], ids=["read", "mapped"])
@pytest.mark.parametrize("columns", [16, 5], ids=["contiguous", "strided"])
def test_a_file_that_becomes_shorter_is_noticed(
    tmp_path: Path, columns: int, most_copied: int | None
) -> None:
    """After its size was looked at: never is a part of the memory left as it was."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * 200))
    window = Window(0, (16, 16), Box((0, 0), (16, columns)))
    with open_file(tmp_path, path.name) as file, pytest.raises(EOFError):
        read_window(file, 0, window, np.ones((16, columns), np.float32), most_copied)


def test_no_read_asks_for_more_than_any_system_takes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(content := bytes(range(250)) * 9)
    monkeypatch.setattr(ranged_reads, "_MOST_AT_ONCE", 1000)
    target = np.zeros(2200, np.uint8)

    def limited(real: Any, descriptor: int, buffers: list[Any], position: int) -> int:
        assert sum(memoryview(buffer).nbytes for buffer in buffers) <= 1000
        count: int = real(descriptor, buffers, position)
        return count

    with open_file(tmp_path, "data") as file, replaced("os.preadv", limited):
        file.read_into(target, 7)
        assert target.tobytes() == content[7:2207]
        with pytest.raises(EOFError):
            file.read_into(target, 60)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_ends_all_tasks(threads: int) -> None:
    begun: list[int] = []

    def work(task: int) -> None:
        begun.append(task)
        if task == 0:
            time.sleep(0.05)  # others fail before
        raise IndexError(task)

    with pytest.raises(IndexError) as raised:
        in_threads(work, range(1000), threads)
    assert raised.value.args == (0,)
    assert len(begun) <= threads


@pytest.mark.parametrize(
    ("shape", "box", "most_bytes"),
    [
        # One rank's rows into one of 64 columns.
        ((256, 2**16), Box((0, 2**12), (256, 2**10)), 256 * 4096),
        # Some columns of some experts: the gaps between these are larger.
        ((8, 64, 2**13), Box((1, 0, 0), (5, 16, 2**11)), 5 * 16 * 2**13),
    ],
)
def test_columns_are_read_without_what_lies_between(
    tmp_path: Path, shape: tuple[int, ...], box: Box, most_bytes: int
) -> None:
    values, counts = torch.randn(shape), list[int]()
    save({"w": shard("w", values)}, tmp_path, ZarrSaveShardedStrategy())
    part = torch.zeros((*box.shape[:-1], box.shape[-1] + 1))[..., :-1]
    wanted = ShardedTensor.from_offset("w", part, shape, box.offset)

    def counting(real: Any, *arguments: Any) -> int:
        count: int = real(*arguments)
        if os.RWF_NOWAIT not in arguments[3:]:  # which only looks whether the file is in memory
            counts.append(count)
        return count

    options = StorageOptions(read_mode=ReadMode.PREAD)
    with replaced("os.preadv", counting):
        load({"w": wanted}, tmp_path, ZarrLoadShardedStrategy(options=options))
    assert torch.equal(part, values[box.slices()])
    assert 0 < sum(counts) <= most_bytes + 2**14  # with what describes the array


@pytest.mark.parametrize("is_short", [False, True])
def test_scattered_values_arrive_each_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    sizes = np.array([5, 1, 0, 300, 5] * 700, dtype=np.int64)
    starts = 11 + np.cumsum(sizes) - sizes
    starts[1000:] += 40  # a gap
    path, content = tmp_path / "data", np.random.default_rng(3).bytes(int(starts[-1] + sizes[-1]))
    path.write_bytes(content)
    arrays = [np.zeros(size, dtype=np.uint8) for size in sizes.tolist()]
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
    if is_short:
        whole = os.preadv

        def some(descriptor: int, buffers: list[Any], position: int) -> int:
            return whole(descriptor, buffers[: len(buffers) // 2 + 1], position)

        monkeypatch.setattr(os, "preadv", some)
    with path.open("rb") as file:
        assert read_scattered(file.fileno(), starts, sizes, addresses)
        for array, start in zip(arrays, starts.tolist(), strict=True):
            assert array.tobytes() == content[start : start + len(array)]
        os.truncate(path, len(content) - 1)
        with pytest.raises(EOFError):
            read_scattered(file.fileno(), starts, sizes, addresses)
