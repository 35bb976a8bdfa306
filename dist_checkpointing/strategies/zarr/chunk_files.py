"""Chunk files: the raw (or encoded) bytes of one chunk, written and read without detours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.filesystem import file_writer, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import bytes_of
from dist_checkpointing.format.geometry import Box, Ints, Window
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.strategies.raw_chunks import damaged
from dist_checkpointing.strategies.zarr.codecs import Codec, unpacked

Array = npt.NDArray[Any]


def chunk_array(data: torch.Tensor, chunk_shape: Ints) -> Array:
    """The C-contiguous array to store for a chunk; padded with zeros where the tensor ends."""
    array = tensor_memory.as_numpy(data.detach().to("cpu"))
    if array.shape == chunk_shape:
        return np.ascontiguousarray(array).reshape(chunk_shape)
    padded = np.zeros(chunk_shape, dtype=array.dtype)
    padded[tuple(slice(0, extent) for extent in array.shape)] = array
    return padded


def write_chunk(folder: Location, name: str, array: Array, codec: Codec | None) -> SealedFile:
    """Write a whole chunk file, which must not exist."""
    if codec is None:
        data = bytes_of(array)
    else:
        # Blosc shuffles bytes by the size of an element, and numpy must not need to know the dtype.
        elements = array.reshape(-1).view(f"V{array.itemsize}")
        data = memoryview(codec.encode(elements)).cast("B")
    return SealedFile(name, len(data), etag=file_writer.put(folder, name, data))


def write_part(path: str, array: Array, chunk_shape: Ints, box: Box) -> int:
    """Write a part of an uncompressed chunk into its place; others write the rest of the file.

    Returns the size of the file.

    Byte ranges of different writers never overlap, so no lock is needed.
    """
    window = Window(0, chunk_shape, box)
    itemsize = array.dtype.itemsize
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, window.array_size * itemsize)
        for start, run in _runs(np.ascontiguousarray(array), window):
            data = bytes_of(run)
            _write_all(descriptor, data, start * itemsize)
    finally:
        os.close(descriptor)
    return window.array_size * itemsize


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


def read_decoded(path: Location, codec: Codec, num_bytes: int, key: str) -> Array:
    """The bytes of the values of a compressed chunk."""
    corrupt = partial(damaged, str(path), key)
    try:
        encoded = location.read_bytes(path, 2 * num_bytes + 2**20)
    except FileNotFoundError as error:
        raise corrupt("a chunk is missing") from error
    try:
        raw = np.frombuffer(unpacked(codec, encoded, num_bytes), dtype=np.uint8)
    except (RuntimeError, ValueError, OSError, EOFError) as error:
        raise corrupt(f"a chunk cannot be decoded: {error}") from error
    if raw.nbytes != num_bytes:
        raise corrupt(
            "a decoded chunk has the wrong size", expected=f"{num_bytes} bytes", found=raw.nbytes
        )
    return raw
