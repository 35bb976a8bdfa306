"""The .distcp files of a rank: records behind each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dist_checkpointing.filesystem import file_writer
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.geometry import Box, Ints, split_rows
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.storage.staging import HostBlocks, is_on_gpu
from dist_checkpointing.strategies.torch_dist.metadata import Place
from dist_checkpointing.strategies.torch_dist.records import ALIGNMENT, record_format

_MAX_PENDING_BYTES = 2**20
_MAX_PENDING_PARTS = 512  # of the 1024 that one system call takes


def file_name(rank: int, number: int, prefix: str = "") -> str:
    """The name of a data file, from which Megatron's tools tell the rank.

    Args:
        rank: Rank that writes it.
        number: Number among the files of that rank.
        prefix: What the keys of all tensors in it begin with.
    """
    return f"{disk_name(prefix) if prefix else ''}__{rank}_{number}.distcp"


class DataFile:
    """A file that grows at its end, by what lies in memory, without copying it together.

    Args:
        path: of the file, in the folder of the checkpoint.
        with_crc: whether records get a CRC-32.
        buffer_bytes: memory for what cannot be written in place.
    """

    def __init__(self, path: Location, *, with_crc: bool, buffer_bytes: int) -> None:
        self._file = file_writer.create(path)
        self._name = path.name
        self._stays = True
        self._with_crc = with_crc
        self._buffer_bytes = buffer_bytes
        self._pending: list[memoryview] = []
        self._pending_bytes = 0
        self._size = 0
        self._host_blocks = HostBlocks(buffer_bytes, self._flush)

    def close(self, *, is_durable: bool) -> SealedFile:
        """Complete the file."""
        self._flush()
        etag = self._file.close(is_durable=is_durable)
        return SealedFile(self._name, self._size, etag=etag)

    def give_up(self) -> None:
        """Let go of a file that is not complete."""
        self._file.give_up()

    def add_bytes(self, content: bytes) -> Place:
        """Add a record that is complete already."""
        self._align()
        start = self._size
        self._append(content)
        return Place(self._name, start, self._size - start)

    def add_tensor(self, data: torch.Tensor, shape: Ints, digest: xxhash.xxh3_64 | None) -> Place:
        """Add the record of a tensor.

        Args:
            data: on any device, of any strides. Must not change until the file is complete.
            shape: shape that the record states.
            digest: is told the values.
        """
        self._align()
        start, frame, crc = self._size, record_format(data.dtype, shape), 0
        self._append(frame.head)
        # The memory of the copies from a GPU is used again.
        self._stays &= not is_on_gpu(data)
        blocks = (
            (_bytes_of(tensor_memory.as_numpy(block)) for _, block in self._host_blocks.of([data]))
            if is_on_gpu(data)
            else _blocks(data, self._buffer_bytes)
        )
        for block in blocks:
            if digest is not None:
                digest.update(block)
            if self._with_crc:
                crc = crc32(block, crc)
            self._append(block)
        self._append(frame.tail(crc))
        return Place(self._name, start, self._size - start)

    def _append(self, data: Any) -> None:
        view = memoryview(data)
        if view.nbytes:
            self._pending.append(view)
            self._pending_bytes += view.nbytes
            self._size += view.nbytes
        if self._pending_bytes >= _MAX_PENDING_BYTES or len(self._pending) >= _MAX_PENDING_PARTS:
            self._flush()

    def _align(self) -> None:
        # So that the values of the next record are aligned in memory if the file is mapped.
        self._append(bytes(-self._size % ALIGNMENT))

    def _flush(self) -> None:
        parts, self._pending = self._pending, []
        if parts:
            self._file.write(parts, self._pending_bytes, stays=self._stays)
        self._pending_bytes = 0


def _blocks(data: torch.Tensor, buffer_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor in C order: all of it in place, or copies of a part at a time."""
    if data.requires_grad:
        data = data.detach()
    if data.is_cpu and data.is_contiguous():
        yield _bytes_of(tensor_memory.as_numpy(data))
        return
    most = max(1, buffer_bytes // data.dtype.itemsize)
    for box in split_rows(Box.whole(tuple(data.shape)), most):
        yield _bytes_of(tensor_memory.as_numpy(data[box.slices()].to("cpu")))


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The elements of an array in C order; its own memory, if they lie so."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]
