"""Raw chunks against numpy: any window of any chunk, anywhere in a file, into any destination."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box, Window
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    LoadItemType,
    LoadPlan,
    MetadataIndex,
    ReadItem,
)
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.filling import Filler
from dist_checkpointing.strategies.raw_chunks import ChunkReads, Extent, read_chunks, read_extent
from dist_checkpointing.strategies.windows import read_window


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
    dtype: dtypes.DType,
    tensors: list[torch.Tensor],
    *,
    options: StorageOptions | None = None,
    maps_files: bool = False,
) -> int:
    """Read the items from chunks at (offset, bytes) of one file; how many bytes were reported."""
    options = options or StorageOptions()
    stored = Index.of([StoredTensor("w", dtype, (1,), (1,))])
    most = max(1, options.buffer_bytes // options.threads)
    planner = _Destinations(tensors)
    filler = Filler(LoadPlan(items), planner, stored, most, maps_files=maps_files)
    offsets, sizes = np.array(extents, dtype=np.int64).T
    rows, files = np.arange(len(items)), np.zeros(len(items), dtype=np.int64)
    reported: list[int] = []
    reads = ChunkReads(rows, [str(path)], files, offsets, sizes)
    read_chunks(reads, filler, options, report=reported.append)
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
    dtype=st.sampled_from([row for row in dtypes.DTYPES if row.name != "bool"]),
    maps_files=st.booleans(),
    buffer_bytes=st.sampled_from([1, 64, 2**20]),
    destination=st.sampled_from(["dense", "strided", "other dtype"]),
)
def test_every_window_arrives(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[Window],
    gaps: list[int],
    dtype: dtypes.DType,
    maps_files: bool,
    buffer_bytes: int,
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
        raw = dtypes.as_numpy(values).tobytes()
        items.append(item(number, window))
        extents.append((len(content), len(raw)))
        content += raw
        whole = values[window.start : window.start + window.array_size].reshape(window.shape)
        expected.append(whole[window.box.slices()].to(wide))
        box = window.box.shape
        if destination == "dense":
            tensors.append(torch.empty(box, dtype=dtype.torch))
        elif destination == "strided":
            tensors.append(torch.empty((*box, 3), dtype=dtype.torch)[..., 1])
        else:
            tensors.append(torch.empty(box, dtype=wide))
    path.write_bytes(content)
    options = StorageOptions(threads=2, buffer_bytes=buffer_bytes)
    reported = read_all(
        items, extents, path, dtype, tensors, options=options, maps_files=maps_files
    )
    for tensor, want in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.to(wide), want)
    assert reported == sum(p.box.num_elements for p in parts) * dtype.itemsize


@pytest.mark.parametrize("maps_files", [True, False])
@pytest.mark.parametrize("columns", [16, 5], ids=["contiguous", "strided"])
def test_a_file_that_ends_early_is_named(tmp_path: Path, columns: int, maps_files: bool) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * 256))
    window = Window(0, (16, 16), Box((0, 0), (16, columns)))
    kind, tensors = dtypes.from_torch(torch.float32), [torch.empty(16, columns)]
    with pytest.raises(CorruptCheckpointError, match="ends before it") as caught:
        read_all([item(0, window)], [(4, 4 * 256)], path, kind, tensors, maps_files=maps_files)
    assert caught.value.findings[0].path == str(path)
    assert caught.value.findings[0].key == "w"


def test_more_small_chunks_than_one_read_takes(tmp_path: Path) -> None:
    values = np.arange(24 * 2**16, dtype=np.float32)
    path = tmp_path / "data"
    path.write_bytes(values.tobytes())
    window = Window(0, (2**16,), Box((0,), (2**16,)))
    kind = dtypes.from_torch(torch.float32)
    items = [item(i, window) for i in range(24)]
    tensors = [torch.empty(2**16) for _ in items]
    done = read_all(items, [(i * 2**18, 2**18) for i in range(24)], path, kind, tensors)
    assert torch.equal(torch.cat(tensors), torch.from_numpy(values))
    assert done == values.nbytes


@pytest.mark.parametrize("num_bytes", [63, 65])
def test_a_file_that_is_one_chunk_must_be_as_long(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(num_bytes))
    with pytest.raises(CorruptCheckpointError, match="wrong size; expected 64 bytes; found"):
        read_extent(Extent(str(path), 0, 64, file_bytes=64), "w")


@pytest.mark.parametrize("columns", [16, 5], ids=["contiguous", "strided"])
def test_a_file_that_becomes_shorter_is_noticed(tmp_path: Path, columns: int) -> None:
    """After its size was looked at: never is a part of the memory left as it was."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * 200))
    window = Window(0, (16, 16), Box((0, 0), (16, columns)))
    with path.open("rb") as file, pytest.raises(EOFError):
        read_window(file.fileno(), 0, window, np.ones((16, columns), dtype=np.float32), 64)


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        read_extent(Extent(str(tmp_path / "gone"), 0, 1), "w")
    assert caught.value.findings[0].path == str(tmp_path / "gone")
