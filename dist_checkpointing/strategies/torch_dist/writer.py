"""Writes ``.distcp`` files: records of ``torch.save`` behind each other.

A record is a zip archive whose entries are not compressed, so the values of a tensor are a run of
bytes in the file. Writing puts a few hundred bytes before and behind those that are in memory
already; reading finds the run and reads any part of it.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import numpy as np
import torch
import xxhash
from torch.serialization import get_crc32_options

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, bytes_of, checksum_of_bytes
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.geometry import Box, Ints, split_rows, values_of_part
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import ShardedObject, tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.shard_table import Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.storage.options import Checksum, Durability, StorageOptions
from dist_checkpointing.storage.staging import HostBlocks, is_on_gpu
from dist_checkpointing.strategies.data_files import DataFiles, balanced, write_shares
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.torch_archives import (
    CENTRAL,
    END,
    END64,
    END64_LOCATOR,
    EXTRA,
    LOCAL,
    OVERFLOW,
    SIZES64,
    SIZES_FOLLOW,
)
from dist_checkpointing.strategies.torch_dist.metadata import (
    DcpMetadata,
    Place,
    common_box_shape,
    dcp_tensor,
    flattened_chunk,
    to_pickle,
    unique_keys,
)

ALIGNMENT = 64
"""Records and the values in them begin at multiples of this, as PyTorch's own do in an archive."""
_UTF8 = 0x800
_VERSION = 45  # of the format that knows 64-bit sizes
_PADDING_ID = 0x4246
_ROOT = b"archive/"
_DATA_NAME = _ROOT + b"data/0"


def contiguous_stride(shape: Ints) -> Ints:
    """Strides of a contiguous tensor, as PyTorch counts them."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


STORAGE_CLASSES: dict[torch.dtype, type] = {
    torch.bool: torch.BoolStorage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
"""Dtypes that pickles name by a class; the others came later and are rebuilt from bytes."""


class _Storage(NamedTuple):
    """What PyTorch's pickles say of the memory of a tensor."""

    kind: str
    cls: Any
    name: str
    location: str
    size: int


class _Described:
    """Pickles like a contiguous tensor of a dtype and shape."""

    def __init__(self, dtype: torch.dtype, shape: Ints) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        count, stride = math.prod(self._shape), contiguous_stride(self._shape)
        if self._dtype in STORAGE_CLASSES:
            cls, size, rest = STORAGE_CLASSES[self._dtype], count, []
            rebuild: Any = torch._utils._rebuild_tensor_v2  # noqa: SLF001 - the name in the files
        else:
            cls, size, rest = torch.UntypedStorage, count * self._dtype.itemsize, [self._dtype]
            rebuild = torch._utils._rebuild_tensor_v3  # noqa: SLF001
        storage = _Storage("storage", cls, "0", "cpu", size)
        return rebuild, (storage, 0, self._shape, stride, False, OrderedDict(), *rest)


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return tuple(obj) if isinstance(obj, _Storage) else None


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The bytes around the values of a contiguous tensor of one dtype and shape.

    The directory lists the entries in ``head``, as they are listed at the end.
    """

    head: bytes
    num_bytes: int
    directory: bytes

    def tail(self, crc: int) -> bytes:
        """The bytes behind the values. PyTorch's readers ignore the CRC-32; zip tools do not."""
        size, extra, sizes = self.num_bytes, b"", struct.Struct("<2I")
        if size >= OVERFLOW:
            sizes = SIZES64
            size, extra = OVERFLOW, EXTRA.pack(1, sizes.size) + sizes.pack(size, size)
        descriptor = struct.pack("<4sI", b"PK\x07\x08", crc)
        descriptor += sizes.pack(self.num_bytes, self.num_bytes)
        start, count = self.head.rindex(b"PK\x03\x04"), _NUM_SMALL_ENTRIES + 1
        directory = self.directory + _central(_DATA_NAME, crc, size, start, extra)
        where = len(self.head) + self.num_bytes + len(descriptor)
        end64 = END64.pack(
            b"PK\x06\x06", END64.size - 12, _VERSION, _VERSION, 0, 0, count, count,
            len(directory), where,
        )  # fmt: skip
        locator = END64_LOCATOR.pack(b"PK\x06\x07", 0, where + len(directory), 1)
        end = END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(where, OVERFLOW), 0)
        return descriptor + directory + end64 + locator + end


_NUM_SMALL_ENTRIES = 3


@lru_cache(maxsize=1024)
def record_format(dtype: torch.dtype, shape: Ints) -> RecordFormat:
    """How ``torch.save`` frames a contiguous CPU tensor; thousands of tensors share a few."""
    description = io.BytesIO()
    _TensorPickler(description, protocol=2).dump(_Described(dtype, shape))
    small = {"data.pkl": description.getvalue(), "byteorder": b"little", "version": b"3\n"}
    assert len(small) == _NUM_SMALL_ENTRIES
    head, directory = b"", b""
    for name, content in small.items():
        path, crc = _ROOT + name.encode(), crc32(content)
        directory += _central(path, crc, len(content), len(head), b"")
        head += LOCAL.pack(
            b"PK\x03\x04", _VERSION, _UTF8, 0, 0, 0, crc, len(content), len(content), len(path), 0
        )
        head += path + content
    unpadded = len(head) + LOCAL.size + len(_DATA_NAME) + EXTRA.size
    padding = -unpadded % ALIGNMENT
    head += LOCAL.pack(
        b"PK\x03\x04", _VERSION, _UTF8 | SIZES_FOLLOW, 0, 0, 0, 0, 0, 0, len(_DATA_NAME),
        EXTRA.size + padding,
    )  # fmt: skip
    head += _DATA_NAME + EXTRA.pack(_PADDING_ID, padding) + b"Z" * padding
    return RecordFormat(head, math.prod(shape) * dtype.itemsize, directory)


def _central(name: bytes, crc: int, size: int, start: int, extra: bytes) -> bytes:
    flags = _UTF8 | (SIZES_FOLLOW if name == _DATA_NAME else 0)
    entry = CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, flags, 0, 0, 0, crc, size, size, len(name), len(extra),
        0, 0, 0, 0, start,
    )  # fmt: skip
    return entry + name + extra


_MAX_PENDING_BYTES = 2**20


def file_name(rank: int, number: int, prefix: str = "") -> str:
    """The name of a data file, from which Megatron's tools tell the rank.

    Args:
        rank: Rank that writes it.
        number: Number among the files of that rank.
        prefix: What the keys of all tensors in it begin with.
    """
    return f"{disk_name(prefix) if prefix else ''}__{rank}_{number}.distcp"


class RecordFile(DataFiles):
    """A file of records, each begun at a multiple of the alignment; see ``DataFiles``.

    What cannot be written in place takes ``buffer_bytes``.

    Attributes:
        rows: What has been written.
    """

    def __init__(
        self,
        root: Location,
        name: str,
        options: StorageOptions,
        buffer_bytes: int,
        report: Callable[[int], None],
        *,
        with_crc: bool,
    ) -> None:
        super().__init__(root, name, options, _MAX_PENDING_BYTES, report)
        self.most_bytes, self.stays = sys.maxsize, True
        self.rows: list[Row] = []
        self._with_crc, self._buffer_bytes = with_crc, buffer_bytes
        self._host_blocks = HostBlocks(buffer_bytes, self.flush)

    def next_name(self) -> str:
        return self._stem

    def add_bytes(self, content: bytes) -> Place:
        """Add a record that is complete already."""
        # So that the values of the next record are aligned in memory if the file is mapped.
        self._append(bytes(-self.end % ALIGNMENT))
        start = self.end
        self._append(content)
        return Place(self._stem, start, len(content))

    def add_tensor(self, data: torch.Tensor, digest: xxhash.xxh3_64 | None) -> Place:
        """Add the record of a tensor.

        Args:
            data: on any device, of any strides. Must not change until the file is complete.
            digest: gets the values.
        """
        frame, crc = record_format(data.dtype, tuple(data.shape)), 0
        start = self.add_bytes(frame.head).offset
        # The memory of the copies from a GPU is used again.
        self.stays &= not is_on_gpu(data)
        blocks = (
            (_bytes_of(block) for _, block in self._host_blocks.of([data]))
            if is_on_gpu(data)
            else _blocks(data, self._buffer_bytes)
        )
        for block in blocks:
            if digest is not None:
                digest.update(block)
            if self._with_crc:
                crc = crc32(block, crc)
            self.put(block, block.nbytes, block.nbytes)
        self._append(frame.tail(crc))
        return Place(self._stem, start, self.end - start)

    def _append(self, data: bytes) -> None:
        self.put(data, len(data), 0)


def _blocks(data: torch.Tensor, buffer_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor in C order: all of it in place, or copies of a part at a time."""
    if data.requires_grad:
        data = data.detach()
    if data.is_cpu and data.is_contiguous():
        yield _bytes_of(data)
        return
    most = max(1, buffer_bytes // data.dtype.itemsize)
    for box in split_rows(Box.whole(tuple(data.shape)), most):
        yield _bytes_of(data[box.slices()].to("cpu"))


def _bytes_of(data: torch.Tensor) -> memoryview:
    """The elements of a tensor on the CPU in C order; its own memory, if they lie so."""
    return bytes_of(np.ascontiguousarray(tensor_memory.as_numpy(data)))


_MIN_FILE_BYTES = 32 * 2**20
_MOST_FILES = 8
"""Of one rank. Rank 0 names the files of all ranks before they are written, and does not know how
many threads another rank has."""
Row = tuple[str, Ints | None, Ints | None, Place]
"""What a rank wrote: key, offsets and sizes of a chunk (None for a value), and where it is."""


class TorchDistWriter(StorageWriter):
    """Writes what plain torch DCP and Megatron-Core read.

    Attributes:
        separation_hint: Tensors whose keys begin with this get data files of their own.
    """

    # A chunk is a shard, however large it is.
    layout: RowBlockLayout = RowBlockLayout(max_chunk_bytes=1 << 62)
    keeps_fingerprints: ClassVar[bool] = False
    uses_object_stores: ClassVar[bool] = True

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self.separation_hint: str | None = None
        self._with_crc = get_crc32_options()  # which other threads may not see

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        clashes = [key for key in unique_keys(index) if key in index]
        if clashes:
            problem = "is also the name of a cell of a ShardedObject"
            findings = [Finding(problem, key, remedy="Rename it.") for key in clashes]
            raise InvalidShardingError("keys of the state dict clash", findings)
        names = [
            file_name(rank, number, prefix)
            for prefix in dict.fromkeys(("", self.separation_hint or ""))
            for rank in range(world_size)
            for number in range(_MOST_FILES)
        ]
        return [DCP_METADATA_NAME, CHECKSUMS_NAME, *names]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        index, table = plan.index, plan.table
        assert index is not None
        data_of, is_object = planner.data_of(plan), table.is_object.tolist()
        keys = set(table.take(~table.is_object).key_column)
        flattened = {key: common_box_shape(index[key]) is not None for key in keys}
        shares = self._files_of(table)
        buffer_bytes = max(1, self.options.buffer_bytes // max(1, len(shares)))
        sizes = np.zeros(len(table), dtype=np.int64)
        checksums = np.zeros(len(table), dtype=np.uint64)
        with_checksums = self.options.checksum is Checksum.XXH3

        def open_file(name: str, report: Callable[[int], None]) -> RecordFile:
            folder, options, crc = self.checkpoint_dir, self.options, self._with_crc
            return RecordFile(folder, name, options, buffer_bytes, report, with_crc=crc)

        def fill(name: str, file: RecordFile) -> None:
            for row in shares[name].tolist():
                key, written = table.key(row), len(file.rows)
                data: Any = data_of(row)
                if is_object[row]:
                    # Megatron keeps a list of all cells of this name on the rank.
                    value = serialize([data], f"the ShardedObject {key!r}")
                    cell = ShardedObject(key, None, table.global_shape(row), table.box(row).offset)
                    checksums[row] = checksum_of_bytes(value)
                    file.rows.append((cell.unique_key, None, None, file.add_bytes(value)))
                else:
                    hasher = xxhash.xxh3_64() if with_checksums else None
                    parts = _chunks(table.box(row), table.flat_range(row), data, flattened[key])
                    file.rows += [
                        (key, offsets, values.shape, file.add_tensor(values, hasher))
                        for offsets, values in parts
                    ]
                    checksums[row] = 0 if hasher is None else hasher.intdigest()
                sizes[row] = sum(place.length for *_, place in file.rows[written:])

        threads = max(1, len(shares))
        filled = write_shares(list(shares), open_file, fill, self.report, threads)
        rows = [row for file, _ in filled for row in file.rows]
        # Rank 0 commits, which makes its own names durable.
        if self.rank and self.options.durability is Durability.FSYNC and shares:
            location.fsync_folder(self.checkpoint_dir)
        files = tuple(file for _, sealed in filled for file in sealed)
        checked = None if with_checksums else table.is_object
        return done(WriteResults(table, sizes, checksums, checked, files, rows))

    def _files_of(self, table: ShardTable) -> dict[str, Int64s]:
        """The rows in each file of this rank, by name."""
        hint = self.separation_hint or ""
        begins = np.array([bool(hint) and name.startswith(hint) for name in table.names] or [False])
        # Objects are not removed by prefix, and would keep the file.
        is_apart = begins[table.keys] & ~table.is_object
        files: dict[str, Int64s] = {}
        for prefix, is_here in (("", ~is_apart), (hint, is_apart)):
            rows, sizes = np.flatnonzero(is_here), table.num_bytes
            most = min(self.options.threads, _MOST_FILES)
            count = max(1, min(most, int(sizes[rows].sum()) // _MIN_FILE_BYTES))
            parts = [part for part in balanced(rows, sizes, count) if len(part)]
            files |= {file_name(self.rank, n, prefix): part for n, part in enumerate(parts)}
        return files

    def finish(
        self, metadata: Index, results: Sequence[Sequence[WriteResult]]
    ) -> Sequence[SealedFile] | None:
        chunks: dict[str, list[tuple[Ints, Ints]]] = {key: [] for key in metadata}
        values: list[str] = []
        places: dict[tuple[str, Ints | None], Place] = {}
        rows: Iterator[Any] = (result.storage_data for of_rank in results for result in of_rank)
        for key, offsets, sizes, place in chain.from_iterable(rows):
            places[key, offsets] = place
            if offsets is None:
                values.append(key)
            else:
                chunks[key].append((offsets, sizes))
        tensors = {key: dcp_tensor(metadata[key], chunks[key]) for key in metadata}
        content = to_pickle(DcpMetadata(tensors, tuple(values), places))
        path = self.checkpoint_dir / DCP_METADATA_NAME
        location.write_content(path, content, self.options.durability)
        return [SealedFile.of_bytes(DCP_METADATA_NAME, content)]


def _chunks(
    box: Box, flat: tuple[int, int] | None, data: torch.Tensor, is_flattened: bool
) -> Iterator[tuple[Ints, torch.Tensor]]:
    """Offsets and values of a part of a tensor as DCP will know it.

    A range of a flattened box becomes the boxes that it consists of, which every reader of DCP
    understands, unless its tensor is stored flattened.
    """
    if flat is None:
        yield box.offset, data.view(box.shape)
    elif is_flattened:
        offsets, shape = flattened_chunk(box, flat)
        yield offsets, data.view(shape)
    else:
        for part, values in values_of_part(box, flat, data):
            yield part.offset, values
