"""Raw chunks against numpy: any window of any chunk, anywhere in a file, into any destination."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dist_checkpointing import ObjectPath, ObjectStoreOptions
from dist_checkpointing.filesystem import Location, ranged_reads
from dist_checkpointing.filesystem.ranged_reads import open_file, reads_below
from dist_checkpointing.format import Box, Index, StoredTensor, Window
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    LoadItemType,
    LoadPlan,
    MetadataIndex,
    ReadItem,
)
from dist_checkpointing.storage import StorageOptions
from dist_checkpointing.strategies import chunk_reads as reading
from dist_checkpointing.strategies.chunk_reads import (
    ChunkReads,
    Filler,
    read_chunks,
    read_scattered,
    read_window,
)
from dist_checkpointing.threads import in_threads
from faults import replaced
from stores import new_url, put

FLOAT = tensor_memory.from_torch(torch.float32)


class _Destinations(DefaultLoadPlanner):
    """Hands out one tensor an item, by the item's index."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        assert item.dest_index.index is not None
        return self.tensors[item.dest_index.index][item.dest.box.slices()]

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        own = self.acquire_tensor(item)
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)


def item(number: int, window: Window) -> ReadItem:
    index = MetadataIndex("w", window.box.offset, number)
    dest = Window(0, window.box.shape, Box.whole(window.box.shape))
    return ReadItem(LoadItemType.TENSOR, index, dest, MetadataIndex("w"), window)


def read_all(
    items: list[ReadItem],
    extents: list[tuple[int, int]],
    path: Path,
    tensors: list[torch.Tensor],
    dtype: tensor_memory.DType = FLOAT,
    *,
    options: StorageOptions | None = None,
    kind: str = "read",
) -> int:
    """Read the items from chunks at (offset, bytes) of one file; how many bytes were reported."""
    options = options or StorageOptions()
    stored = Index.of([StoredTensor("w", dtype, (1,), (1,))])
    folder: Location = path.parent
    if kind == "in a store":
        parts = ObjectStoreOptions(part_bytes=2**10, parallelism=4)
        folder = ObjectPath.of(new_url(), parts)
        put(folder, path.name, path.read_bytes())
    files = reads_below(folder, options.threads, options.buffer_bytes, lambda _: kind == "mapped")
    filler = Filler(LoadPlan(items), _Destinations(tensors), stored, files)
    offsets, sizes = np.array(extents, dtype=np.int64).T
    rows, numbers = np.arange(len(items)), np.zeros(len(items), dtype=np.int64)
    reported: list[int] = []
    reads = ChunkReads(rows, [path.name], numbers, offsets, sizes)
    read_chunks(reads, filler, files, report=reported.append)
    return sum(reported)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    extents = tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True))
    return Window(draw(st.integers(0, 3)), shape, Box(offset, extents))


@settings(deadline=None)  # the first read of a process may take long
@given(
    parts=st.lists(windows(), min_size=1, max_size=6),
    gaps=st.lists(st.sampled_from([0, 1, 40, 70_000, 300_000]), min_size=6, max_size=6),
    dtype=st.sampled_from([row for row in tensor_memory.DTYPES if row.name != "bool"]),
    kind=st.sampled_from(["mapped", "read", "in a store"]),
    buffer_bytes=st.sampled_from([1, 64, 2**20]),
    most_gap=st.sampled_from([0, 8, 2**16]),
    destination=st.sampled_from(["dense", "strided", "rows of a wider one", "other dtype"]),
)
def test_every_window_arrives(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[Window],
    gaps: list[int],
    dtype: tensor_memory.DType,
    kind: str,
    buffer_bytes: int,
    most_gap: int,
    destination: str,
) -> None:
    path = tmp_path_factory.mktemp("raw") / "data"
    wide = torch.complex128 if dtype.torch.is_complex else torch.float64
    rng = np.random.default_rng(7)
    content, items, extents, expected, tensors = b"", [], [], [], []
    for number, (window, gap) in enumerate(zip(parts, gaps, strict=False)):
        content += bytes(gap)
        count = window.start + window.array_size + 2
        # Powers of two, which every dtype holds.
        values = torch.from_numpy(2.0 ** rng.integers(0, 4, count)).to(dtype.torch)
        raw = tensor_memory.as_numpy(values).tobytes()
        items.append(item(number, window))
        extents.append((len(content), len(raw)))
        content += raw
        whole = values[window.start : window.start + window.array_size].reshape(window.shape)
        expected.append(whole[window.box.slices()].to(wide))
        box = window.box.shape
        if destination == "rows of a wider one" and box:
            wider = torch.empty((*box[:-1], box[-1] + 1), dtype=dtype.torch)
            tensors.append(wider[..., : box[-1]])
        elif destination == "strided":
            tensors.append(torch.empty((*box, 3), dtype=dtype.torch)[..., 1])
        else:
            is_other = destination == "other dtype"
            tensors.append(torch.empty(box, dtype=wide if is_other else dtype.torch))
    path.write_bytes(content)
    if kind == "in a store":  # where each part is a request
        buffer_bytes = max(buffer_bytes, 64)
    options = StorageOptions(threads=2, buffer_bytes=buffer_bytes)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_MOST_GAP_BYTES", "_MOST_MAPPED_GAP_BYTES"):
            patch.setattr(reading, name, most_gap)
        patch.setattr(ranged_reads.StoreFile, "most_gap", most_gap)
        reported = read_all(items, extents, path, tensors, dtype, options=options, kind=kind)
    for tensor, want in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.to(wide), want)
    assert reported == sum(p.box.num_elements for p in parts) * dtype.itemsize


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
    path, values = tmp_path / "data", np.random.default_rng(3).random(shape, dtype=np.float32)
    path.write_bytes(values.tobytes())
    tensor, counts = torch.zeros((*box.shape[:-1], box.shape[-1] + 1))[..., :-1], list[int]()

    def counting(real: Any, *arguments: Any) -> int:
        count: int = real(*arguments)
        if os.RWF_NOWAIT not in arguments[3:]:  # which only looks whether the file is in memory
            counts.append(count)
        return count

    with replaced("os.preadv", counting):
        read_all([item(0, Window(0, shape, box))], [(0, values.nbytes)], path, [tensor])
    assert torch.equal(tensor, torch.from_numpy(values)[box.slices()])
    assert 0 < sum(counts) <= most_bytes


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
