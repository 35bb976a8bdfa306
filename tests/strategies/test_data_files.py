"""Values in data files: where they are said to lie, and as they were in memory."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dist_checkpointing.filesystem import file_writer
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies import DataFiles


def in_memory(folder: Path, sizes: Sequence[int], most_file: int) -> None:
    arrays = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
    values = [b"before", *(array.tobytes() for array in arrays), b"behind"]
    reports: list[int] = []
    options = StorageOptions(durability=Durability.PAGE_CACHE, data_file_bytes=most_file)
    files = DataFiles(folder, "part", options, 2**20, reports.append)
    files.put(b"before", 6, 0)
    files.put_memory(np.array([array.ctypes.data for array in arrays]), np.array(sizes))
    files.put(b"behind", 6, 0)
    sealed = files.finish()
    assert sum(reports) == sum(sizes)
    contents = [(folder / name).read_bytes() for name in files.names]
    assert [len(content) for content in contents] == [file.num_bytes for file in sealed]
    columns = (files.extents[column::3] for column in range(3))
    for value, (file, offset, length) in zip(values, zip(*columns, strict=True), strict=True):
        assert contents[file][offset : offset + length] == value
    assert b"".join(contents) == b"".join(values)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.sampled_from([1, 700, 2**30]),
    st.sampled_from([1, 7, 400, 2**30]),
    st.sampled_from([1, 3, 1024]),
)
def test_values_in_memory_lie_where_it_is_said(
    sizes: list[int], most_file: int, most_written: int, most_parts: int
) -> None:
    """Also if the system writes less than it is given, or is interrupted."""
    real, calls = file_writer._writev, iter(range(10**9))

    def writev(descriptor: int, parts: int, count: int) -> int:
        if next(calls) % 5 == 4:
            ctypes.set_errno(errno.EINTR)
            return -1
        own = np.ctypeslib.as_array(ctypes.cast(parts, ctypes.POINTER(ctypes.c_size_t)), (count, 2))
        held = [ctypes.string_at(int(start), int(size)) for start, size in own]
        return os.write(descriptor, b"".join(held)[:most_written])

    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(file_writer, "_writev", writev),
        mock.patch.object(file_writer, "MOST_PARTS", most_parts),
    ):
        in_memory(Path(name), sizes, most_file)
    with tempfile.TemporaryDirectory() as name:
        assert file_writer._writev is real
        in_memory(Path(name), sizes, most_file)


def test_memory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    files = DataFiles(tmp_path, "part", StorageOptions(), 2**20, lambda _: None)
    with pytest.raises(OSError, match="Bad address"):
        files.put_memory(np.array([4096]), np.array([10]))
    files.give_up()


def test_no_file_is_made_without_values_and_none_is_overwritten(tmp_path: Path) -> None:
    def save(value: bytes) -> None:
        files = DataFiles(tmp_path, "part", StorageOptions(), 2**20, lambda _: None)
        files.put(value, len(value), len(value))
        files.finish()

    DataFiles(tmp_path, "part", StorageOptions(), 2**20, lambda _: None).finish()
    assert not list(tmp_path.iterdir())
    (tmp_path / "part.0").write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        save(b"value")
    (tmp_path / "part.0").unlink()
    (tmp_path / "part.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        save(b"value")
