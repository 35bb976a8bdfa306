"""Values in data files: where they are said to lie, and as they were in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_checkpointing.format.digests import Digest, digest_of
from dist_checkpointing.storage.options import Durability, StorageOptions
from dist_checkpointing.strategies.tensorstore import data_files
from dist_checkpointing.strategies.tensorstore.data_files import DataFiles


def filled(folder: Path, sizes: Sequence[int], most_pending: int, most_file: int) -> DataFiles:
    reported: list[int] = []
    options = StorageOptions(durability=Durability.PAGE_CACHE, data_file_bytes=most_file)
    files = DataFiles(folder, "part", options, most_pending, reported.append)
    values = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    for number, value in enumerate(values):
        if number % 3 == 2:
            digest = Digest() if number % 2 else None
            files.put_large(np.frombuffer(value, dtype=np.uint8), len(value), digest)
            assert digest is None or digest.digest() == digest_of(value, len(value))
        else:
            files.put(value, len(value), len(value))
    sealed = files.finish()
    assert sum(reported) == sum(sizes)
    assert [file.name for file in sealed] == files.names
    contents = [(folder / name).read_bytes() for name in files.names]
    assert [len(content) for content in contents] == [file.num_bytes for file in sealed]
    columns = (files.file, files.offset, files.length)
    for value, (file, offset, length) in zip(values, zip(*columns, strict=True), strict=True):
        assert contents[file][offset : offset + length] == value
    assert b"".join(contents) == b"".join(values)
    return files


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=40),
    st.sampled_from([1, 500, 2**30]),
    st.sampled_from([1, 700, 2**30]),
)
def test_values_lie_where_it_is_said(sizes: list[int], most_pending: int, most_file: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = filled(Path(name), sizes, most_pending, most_file)
    if most_file == 1 and 0 not in sizes:
        assert len(files.names) == len(sizes)
    if most_file == 2**30:
        assert len(files.names) == min(1, len(sizes))


def test_more_values_than_one_call_takes(tmp_path: Path) -> None:
    files = filled(tmp_path, [3] * 5000, 2**30, 2**30)
    assert len(files.names) == 1


def test_values_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_HASHED_BYTES", 100)
    monkeypatch.setattr(data_files, "_WRITTEN_BYTES", 150)
    filled(tmp_path, [1000, 999, 777, 100, 101, 99, 0, 1, 150], 2**30, 2**30)


def test_the_system_may_write_less_than_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def writev(descriptor: int, parts: Sequence[Any]) -> int:
        return real(descriptor, bytes(parts[0])[:7])

    def write(descriptor: int, part: Any) -> int:
        return real(descriptor, bytes(part)[:11])

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "write", write)
    filled(tmp_path, [40, 50, 200, 7, 8, 9], 2**30, 2**30)


def test_no_file_is_made_without_values_and_none_is_overwritten(tmp_path: Path) -> None:
    filled(tmp_path, [], 1, 1)
    assert not list(tmp_path.iterdir())
    (tmp_path / "part.0").write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        filled(tmp_path, [5], 1, 1)
    (tmp_path / "part.0").unlink()
    (tmp_path / "part.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        filled(tmp_path, [5], 1, 1)
