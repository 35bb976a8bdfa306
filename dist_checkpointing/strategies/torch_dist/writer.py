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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import torch
import xxhash
from torch.serialization import get_crc32_options

from dist_checkpointing.errors import Finding, InvalidShardingError
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, bytes_of, checksum_of
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
from dist_checkpointing.storage.options import Checksum, Durability
from dist_checkpointing.storage.staging import HostBlocks, is_on_gpu
from dist_checkpointing.strategies.base import object_cells
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
    At,
    Chunk,
    DcpMetadata,
    Place,
    common_box_shape,
    dcp_tensor,
    flattened_chunk,
    to_pickle,
)

ALIGNMENT = 64
"""Records and the values in them begin at multiples of this, as PyTorch's own do in an archive."""
_UTF8 = 0x800
_VERSION = 45  # of the format that knows 64-bit sizes
_PADDING_ID = 0x4246
_ROOT = b"archive/"
_DATA_NAME = _ROOT + b"data/0"
_NUM_ENTRIES = 4


def contiguous_stride(shape: Ints) -> Ints:
    """Strides of a contiguous tensor, as PyTorch counts them."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


STORAGE_CLASSES: dict[torch.dtype, Any] = {
    dtype: getattr(torch, name)
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()  # noqa: SLF001 - torch has no public list
}
"""Dtypes that pickles name by a class; the others came later and are rebuilt from bytes."""


class _TensorPickler(pickle.Pickler):
    """Pickles a call like the tensor that it rebuilds."""

    def reducer_override(self, obj: Any) -> Any:
        return (obj.func, obj.args) if type(obj) is partial else NotImplemented

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        # What stands for the memory of a tensor: kind, class, name, device, size.
        return obj if type(obj) is tuple and obj[:1] == ("storage",) else None


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
        start, count = self.head.rindex(b"PK\x03\x04"), _NUM_ENTRIES
        directory = self.directory + _central(_DATA_NAME, crc, size, start, extra)
        where = len(self.head) + self.num_bytes + len(descriptor)
        end64 = END64.pack(
            b"PK\x06\x06", END64.size - 12, _VERSION, _VERSION, 0, 0, count, count,
            len(directory), where,
        )  # fmt: skip
        locator = END64_LOCATOR.pack(b"PK\x06\x07", 0, where + len(directory), 1)
        end = END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), min(where, OVERFLOW), 0)
        return descriptor + directory + end64 + locator + end


@lru_cache(maxsize=1024)
def record_format(dtype: torch.dtype, shape: Ints) -> RecordFormat:
    """How ``torch.save`` frames a contiguous CPU tensor; thousands of tensors share a few."""
    size, num_bytes, dtypes = math.prod(shape), math.prod(shape) * dtype.itemsize, list[Any]()
    rebuild: Any = torch._utils._rebuild_tensor_v2  # noqa: SLF001 - the name in the files
    cls = STORAGE_CLASSES.get(dtype)
    if cls is None:
        cls, size, dtypes = torch.UntypedStorage, num_bytes, [dtype]
        rebuild = torch._utils._rebuild_tensor_v3  # noqa: SLF001
    storage, description = ("storage", cls, "0", "cpu", size), io.BytesIO()
    tensor = (storage, 0, shape, contiguous_stride(shape), False, OrderedDict(), *dtypes)
    _TensorPickler(description, protocol=2).dump(partial(rebuild, *tensor))
    small = {"data.pkl": description.getvalue(), "byteorder": b"little", "version": b"3\n"}
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
    return RecordFormat(head, num_bytes, directory)


def _central(name: bytes, crc: int, size: int, start: int, extra: bytes) -> bytes:
    flags = _UTF8 | (SIZES_FOLLOW if name == _DATA_NAME else 0)
    entry = CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, flags, 0, 0, 0, crc, size, size, len(name), len(extra),
        0, 0, 0, 0, start,
    )  # fmt: skip
    return entry + name + extra


_MAX_PENDING_BYTES = 2**20


def file_name(rank: int, number: int, prefix: str = "") -> str:
    """The name of a data file of a rank, from which Megatron's tools tell the rank.

    The keys of all tensors in it begin with the prefix.
    """
    return f"{disk_name(prefix) if prefix else ''}__{rank}_{number}.distcp"


class RecordFile(DataFiles):
    """A file of records, each begun at a multiple of the alignment; see ``DataFiles``.

    What cannot be written in place takes ``buffer_bytes``. What has been written is in ``rows``.
    """

    def __init__(
        self, writer: TorchDistWriter, buffer_bytes: int, name: str, report: Callable[[int], None]
    ) -> None:
        root, options = writer.checkpoint_dir, writer.options
        super().__init__(root, name, options, _MAX_PENDING_BYTES, report)
        self.most_bytes, self.stays = sys.maxsize, True
        self.rows: list[Row] = []
        self._with_crc, self._buffer_bytes = writer.with_crc, buffer_bytes
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
        """Add the record of a tensor on any device, of any strides; the digest gets its values.

        The tensor must not change until the file is complete.
        """
        frame, crc = record_format(data.dtype, tuple(data.shape)), 0
        start = self.add_bytes(frame.head).offset
        for values in self._blocks(data.detach() if data.requires_grad else data):
            # The memory of the tensor itself, if its elements lie in C order.
            block = bytes_of(np.ascontiguousarray(tensor_memory.as_numpy(values)))
            if digest is not None:
                digest.update(block)
            if self._with_crc:
                crc = crc32(block, crc)
            self.put(block, block.nbytes, block.nbytes)
        self._append(frame.tail(crc))
        return Place(self._stem, start, self.end - start)

    def _blocks(self, data: torch.Tensor) -> Iterable[torch.Tensor]:
        """Blocks of rows on the CPU: one if nothing has to be copied, or a part at a time."""
        if is_on_gpu(data):
            self.stays = False  # The memory of the copies is used again.
            return (block for _, block in self._host_blocks.of([data]))
        if data.is_cpu and data.is_contiguous():
            return [data]
        most = max(1, self._buffer_bytes // data.dtype.itemsize)
        boxes = split_rows(Box.whole(tuple(data.shape)), most)
        return (data[box.slices()].to("cpu") for box in boxes)

    def _append(self, data: bytes) -> None:
        self.put(data, len(data), 0)


_MIN_FILE_BYTES = 32 * 2**20
_MOST_FILES = 8
"""Of one rank. Rank 0 names the files of all ranks before they are written, and does not know how
many threads another rank has."""
Row = tuple[str, Ints | None, Ints | None, Place]
"""What a rank wrote: key, offsets and sizes of a chunk (None for a value), and where it is."""


class TorchDistWriter(StorageWriter):
    """Writes what plain torch DCP and Megatron-Core read.

    Tensors whose keys begin with ``separation_hint`` get data files of their own.
    """

    # A chunk is a shard, however large it is.
    layout: RowBlockLayout = RowBlockLayout(max_chunk_bytes=1 << 62)
    keeps_fingerprints: ClassVar[bool] = False
    uses_object_stores: ClassVar[bool] = True

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self.separation_hint: str | None = None
        self.with_crc: bool = get_crc32_options()  # which other threads may not see

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        names_of_cells = (cell.unique_key for cell in object_cells(index.objects))
        problem = "is also the name of a cell of a ShardedObject"
        clashes = [Finding(problem, k, remedy="Rename it.") for k in names_of_cells if k in index]
        InvalidShardingError.raise_if(clashes, "keys of the state dict clash")
        names = [
            file_name(rank, number, prefix)
            for prefix in dict.fromkeys(("", self.separation_hint or ""))
            for rank in range(world_size)
            for number in range(_MOST_FILES)
        ]
        return [DCP_METADATA_NAME, CHECKSUMS_NAME, *names]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        index, table, options = plan.index, plan.table, self.options
        assert index is not None
        data_of, is_object = planner.data_of(plan), table.is_object.tolist()
        keys = set(table.take(~table.is_object).key_column)
        flattened = {key: common_box_shape(index[key]) is not None for key in keys}
        shares = self._files_of(table)
        threads = max(1, len(shares))
        buffer_bytes = max(1, options.buffer_bytes // threads)
        sizes = np.zeros(len(table), dtype=np.int64)
        checksums = np.zeros(len(table), dtype=np.uint64)
        with_checksums = options.checksum is Checksum.XXH3

        def fill(name: str, file: RecordFile) -> None:
            for row in shares[name].tolist():
                key, box, flat = table.key(row), table.box(row), table.flat_range(row)
                data: Any = data_of(row)
                written = len(file.rows)
                if is_object[row]:
                    # Megatron keeps a list of all cells of this name on the rank.
                    value = serialize([data], f"the ShardedObject {key!r}")
                    cell = ShardedObject(key, None, table.global_shape(row), box.offset)
                    checksums[row] = checksum_of([np.frombuffer(value, np.uint8)])
                    file.rows.append((cell.unique_key, None, None, file.add_bytes(value)))
                else:
                    hasher = xxhash.xxh3_64() if with_checksums else None
                    if flat is not None and flattened[key]:
                        parts = [(flattened_chunk(box, flat), data)]
                    else:
                        # A range becomes boxes, which every reader of DCP understands.
                        parts = [*values_of_part(box, flat, data)]
                    for part, values in parts:
                        place = file.add_tensor(values.view(part.shape), hasher)
                        file.rows.append((key, part.offset, part.shape, place))
                    checksums[row] = 0 if hasher is None else hasher.intdigest()
                sizes[row] = sum(place.length for *_, place in file.rows[written:])

        open_file = partial(RecordFile, self, buffer_bytes)
        filled = write_shares(list(shares), open_file, fill, self.report, threads)
        rows = [row for file in filled for row in file.rows]
        # Rank 0 commits, which makes its own names durable.
        if self.rank and options.durability is Durability.FSYNC and shares:
            location.fsync_folder(self.checkpoint_dir)
        files = tuple(sealed for file in filled for sealed in file.sealed)
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
        chunks: dict[str, list[Chunk]] = {key: [] for key in metadata}
        values: list[str] = []
        places: dict[At, Place] = {}
        rows: Iterable[Any] = (result.storage_data for of_rank in results for result in of_rank)
        for key, offsets, sizes, place in chain.from_iterable(rows):
            places[key, offsets] = place
            if offsets is None:
                values.append(key)
            else:
                chunks[key].append((offsets, sizes))
        tensors = {key: dcp_tensor(metadata[key], chunks[key]) for key in metadata}
        content = to_pickle(DcpMetadata(tensors, tuple(values), places))
        place, durability = (self.checkpoint_dir, DCP_METADATA_NAME), self.options.durability
        return [SealedFile.put(*place, content, durability)]
