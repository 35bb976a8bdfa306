"""The values in one record of a .distcp file, and how any part of them gets into memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.filesystem.ranged_reads import OpenFile, WrongSizeError
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.strategies.filling import Filler
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.torch_archive import BadRecord
from dist_checkpointing.strategies.torch_dist.metadata import Place
from dist_checkpointing.strategies.torch_dist.record_search import find_tensor

Array = npt.NDArray[Any]

SMALL_BYTES = 1 << 16
"""Records up to this size are read whole: one system call costs more than that many bytes."""
_EDGE_BYTES = 1 << 12
"""What is read of either end of a larger record to find the values in it."""


class OpenRecord:
    """One record of an open file. Only what is asked for is read."""

    def __init__(self, file: OpenFile, place: Place) -> None:
        self.file = file
        self.start: int = place.offset
        self.length: int = place.length
        try:
            file.require(self.start + self.length, is_all=False)
        except WrongSizeError as error:
            raise BadRecord(f"{error}, before the record does") from error
        if self.length <= SMALL_BYTES:
            self._head, self._tail = self._pread(0, self.length), b""
        else:
            self._head = self._pread(0, _EDGE_BYTES)
            self._tail = self._pread(self.length - _EDGE_BYTES, _EDGE_BYTES)

    @property
    def is_in_memory(self) -> bool:
        """Whether all of it has been read."""
        return len(self._head) == self.length

    def read(self, start: int, count: int) -> bytes:
        if start + count <= len(self._head):
            return self._head[start : start + count]
        behind = start - (self.length - len(self._tail))
        if behind >= 0 and behind + count <= len(self._tail):
            return self._tail[behind : behind + count]
        return self._pread(start, count)

    def _pread(self, start: int, count: int) -> bytes:
        if start + count > self.length:
            raise BadRecord("it refers to bytes outside of it")
        try:
            return self.file.view(self.start + start, count).tobytes()
        except EOFError as error:
            raise BadRecord(str(error)) from error


def read_object(record: OpenRecord, where: str, *, trusted: bool) -> object:
    """The object in a record of Megatron's, which is a list of all cells that had its name."""
    value = deserialize(record.read(0, record.length), where, trusted=trusted)
    if not isinstance(value, list) or not value:
        raise BadRecord(f"expected a list with a sharded object, found {type(value).__name__}")
    return value[0]


class RecordValues:
    """The values in one record, which must be a tensor of this dtype and shape."""

    def __init__(self, record: OpenRecord, tensor: StoredTensor, shape: Ints) -> None:
        self._record = record
        self._tensor = tensor
        self._shape = shape
        self._found = find_tensor(record.read, record.length)
        self._copy: Array | None = None
        if self._found.layout is not None:
            self._check(self._found.layout.dtype, self._found.layout.shape)

    def _check(self, dtype: torch.dtype, shape: Ints) -> None:
        # Megatron's flattened pieces have axes of extent 1 in front.
        own = shape[len(shape) - len(self._shape) :]
        in_front = shape[: len(shape) - len(self._shape)]
        if (dtype, own) != (self._tensor.dtype.torch, self._shape) or set(in_front) - {1}:
            expected = f"{self._tensor.dtype.torch} of shape {self._shape}"
            raise BadRecord(f"expected {expected}, found {dtype} of shape {shape}")

    def fill(self, row: int, filler: Filler) -> int:
        """Fill a row of a load plan; how many bytes that were."""
        layout, record = self._found.layout, self._record
        if layout is None or not layout.is_contiguous:
            return filler.fill(row, self._rebuilt())
        start = self._found.start
        num_bytes = math.prod(self._shape) * self._tensor.dtype.itemsize
        if start + num_bytes > record.length:
            raise BadRecord("it refers to bytes outside of it")
        if record.is_in_memory:
            values = np.frombuffer(record.read(start, num_bytes), dtype=np.uint8)
            return filler.fill(row, values)
        return filler.read(row, record.file, record.start + start)

    def _rebuilt(self) -> Array:
        """The bytes of all values in C order, of a tensor that lies otherwise in its storage."""
        if self._copy is None:
            content = self._record.read(0, self._record.length)
            tensor = deserialize(content, f"the record of {self._tensor.key!r}")
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if not plain or tensor.layout is not torch.strided or not tensor.is_cpu:
                raise BadRecord(f"expected a plain tensor, found a {type(tensor).__name__}")
            self._check(tensor.dtype, tuple(tensor.shape))
            array = tensor_memory.as_numpy(tensor.detach().contiguous()).reshape(-1)
            self._copy = array.view(np.uint8)
        return self._copy
