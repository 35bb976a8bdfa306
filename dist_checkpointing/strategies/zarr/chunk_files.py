"""Chunk files: the raw (or encoded) bytes of one chunk, written and read without detours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing import dtypes
from dist_checkpointing.dtypes import DType
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.geometry import Box, Ints, Window

Array = npt.NDArray[Any]


class Codec(Protocol):
    """Turns the bytes of a chunk into others and back."""

    def encode(self, data: Any) -> Any:
        """Shorter bytes for a C-contiguous array."""

    def decode(self, data: Any) -> Any:
        """The bytes of the array."""


def chunk_array(data: torch.Tensor, chunk_shape: Ints) -> Array:
    """The C-contiguous array to store for a chunk; padded with zeros where the tensor ends."""
    array = dtypes.as_numpy(data.detach().to("cpu"))
    if array.shape == chunk_shape:
        return np.ascontiguousarray(array).reshape(chunk_shape)
    padded = np.zeros(chunk_shape, dtype=array.dtype)
    padded[tuple(slice(0, extent) for extent in array.shape)] = array
    return padded


def _bytes_of(array: Array) -> memoryview:
    """The memory of a C-contiguous array of any dtype and shape."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def write_chunk(path: Path, array: Array, codec: Codec | None) -> None:
    """Write a whole chunk file, which must not exist."""
    data = _bytes_of(array)
    if codec is not None:
        data = memoryview(codec.encode(data)).cast("B")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, data, 0)
    finally:
        os.close(descriptor)


def write_part(path: Path, array: Array, chunk_shape: Ints, box: Box) -> None:
    """Write a part of an uncompressed chunk into its place; others write the rest of the file.

    Byte ranges of different writers never overlap, so no lock is needed.
    """
    window = Window(0, chunk_shape, box)
    itemsize = array.dtype.itemsize
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, window.array_size * itemsize)
        for start, run in _runs(np.ascontiguousarray(array), window):
            data = _bytes_of(run)
            _write_all(descriptor, data, start * itemsize)
    finally:
        os.close(descriptor)


def _runs(array: Array, window: Window) -> Iterator[tuple[int, Array]]:
    """The contiguous runs that the window's box consists of: (first element, its values)."""
    run = window.contiguous_range()
    if run is not None:
        yield run[0], array
        return
    box = window.box
    axis = next(a for a, extent in enumerate(box.shape) if extent > 1)
    for i in range(box.shape[axis]):
        offset = (*box.offset[:axis], box.offset[axis] + i, *box.offset[axis + 1 :])
        row = Box(offset, (*box.shape[:axis], 1, *box.shape[axis + 1 :]))
        yield from _runs(array.take([i], axis=axis), Window(window.start, window.shape, row))


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


class ChunkFile:
    """One stored chunk, from which windows are read."""

    def __init__(
        self, key: str, path: Path, dtype: DType, num_elements: int, codec: Codec | None
    ) -> None:
        self._key = key
        self._path = path
        self._dtype = dtype
        self._num_bytes = num_elements * dtype.itemsize
        self._codec = codec
        self._decoded: Array | None = None

    def read_into(self, window: Window, target: Array) -> None:
        """Copy a window into ``target``, an array of the window's box shape (any strides).

        Raises:
            CorruptCheckpointError: if the file is missing or not what it should be.
        """
        try:
            if self._codec is None:
                self._read_raw(window, target)
            else:
                self._read_decoded(window, target)
        except FileNotFoundError as error:
            raise self._corrupt("a chunk is missing") from error

    def _read_raw(self, window: Window, target: Array) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            # A mapped file that is too short would kill the process instead of raising.
            size = os.fstat(descriptor).st_size
            if size != self._num_bytes:
                raise self._corrupt(
                    "a chunk has the wrong size", expected=f"{self._num_bytes} bytes", found=size
                )
            run = window.contiguous_range()
            if run is not None and target.flags.c_contiguous:
                view = _bytes_of(target)
                self._read_all(descriptor, view, run[0] * self._dtype.itemsize)
                return
        finally:
            os.close(descriptor)
        mapped = np.memmap(self._path, dtype=self._dtype.numpy, mode="r", shape=(self._total,))
        self._copy(mapped, window, target)

    @property
    def _total(self) -> int:
        return self._num_bytes // self._dtype.itemsize

    def _read_all(self, descriptor: int, view: memoryview, position: int) -> None:
        while view:
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise self._corrupt("a chunk ended early")
            view, position = view[count:], position + count

    def _read_decoded(self, window: Window, target: Array) -> None:
        if self._decoded is None:
            assert self._codec is not None
            encoded = self._path.read_bytes()
            try:
                raw = np.frombuffer(self._codec.decode(encoded), dtype=np.uint8)
            except (RuntimeError, ValueError, OSError, EOFError) as error:
                raise self._corrupt(f"a chunk cannot be decoded: {error}") from error
            if raw.nbytes != self._num_bytes:
                raise self._corrupt(
                    "a decoded chunk has the wrong size",
                    expected=f"{self._num_bytes} bytes",
                    found=raw.nbytes,
                )
            self._decoded = raw.view(self._dtype.numpy)
        self._copy(self._decoded, window, target)

    def _copy(self, stored: Array, window: Window, target: Array) -> None:
        part = stored[window.start : window.start + window.array_size].reshape(window.shape)
        target[...] = part[window.box.slices()]

    def _corrupt(self, problem: str, **details: Any) -> CorruptCheckpointError:
        finding = Finding(problem, self._key, path=str(self._path), **details)
        return CorruptCheckpointError("the checkpoint is damaged", [finding])
