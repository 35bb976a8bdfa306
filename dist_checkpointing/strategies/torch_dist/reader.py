"""Reads boxes, objects and common state out of ``.distcp`` files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding, StateMismatchError
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.ranged_reads import Array, OpenFile
from dist_checkpointing.format.geometry import Box, Ints, Window, padded_rows, ravel_offset
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.mapping import StateDict, tensor_memory
from dist_checkpointing.planning import LoadPlan, LoadPlanner, MetadataIndex, ReadTable
from dist_checkpointing.planning.shard_table import Int64s
from dist_checkpointing.storage.interface import ChunkPlace, StorageReader, done
from dist_checkpointing.strategies import chunk_reads
from dist_checkpointing.strategies.base import KnownFormats, LoadCommonStrategy, PathOrStr
from dist_checkpointing.strategies.pickle_scanner import Stub, check_pickle
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.torch_archives import Archive, BadRecord, entries
from dist_checkpointing.strategies.torch_dist.metadata import (
    COMMON_STATE_CELL,
    DcpMetadata,
    PlacedIndex,
    StatePath,
    cell_named,
    placed_index,
    read_dcp_metadata,
)
from dist_checkpointing.strategies.torch_dist.writer import STORAGE_CLASSES, contiguous_stride

_MOST_DESCRIPTION_BYTES = 1 << 16
_MOST_ELEMENTS = 1 << 62


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How the elements of a stored tensor lie in its storage, in elements of ``dtype``.

    The first one is ``start`` bytes from the first byte of its record.
    """

    storage: str
    dtype: torch.dtype
    storage_bytes: int
    offset: int
    shape: Ints
    stride: Ints
    start: int = 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        steps = zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        return 0 in self.shape or all(extent == 1 or step == c for extent, step, c in steps)


def find_tensor(record: Archive) -> StoredLayout | None:
    """Find the values of the tensor in a record, without reading them.

    None stands for a tensor of a subclass, which only PyTorch can rebuild.
    """
    found = entries(record)
    start, size = found.get("data.pkl") or _missing("data.pkl")
    if size > _MOST_DESCRIPTION_BYTES:
        raise BadRecord(f"a description of {size} bytes")
    if "byteorder" in found:
        begin, count = found["byteorder"]
        if record[begin : begin + count] != b"little":
            raise BadRecord("it was not written by a little-endian machine")
    layout = _describe(bytes(record[start : start + size]))
    if layout is None:
        return None
    start, size = found.get(f"data/{layout.storage}") or _missing(f"data/{layout.storage}")
    if size != layout.storage_bytes:
        raise BadRecord(f"a storage of {layout.storage_bytes} bytes with {size} bytes of data")
    return replace(layout, start=start + layout.offset * layout.dtype.itemsize)


def _missing(name: str) -> tuple[int, int]:
    raise BadRecord(f"its archive has no {name}")


_STORAGE_DTYPES = {f"torch.{cls.__name__}": dtype for dtype, cls in STORAGE_CLASSES.items()}
_STORAGE_DTYPES["torch.storage.UntypedStorage"] = torch.uint8
# Functions that make a plain tensor, with the number of their arguments. One more is for conjugate
# and negative views: what is stored is not what they stand for.
_REBUILDERS = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}


@lru_cache(maxsize=1024)
def _describe(content: bytes) -> StoredLayout | None:
    """What the pickle of a tensor says; nothing is made of it."""
    storages: list[Stub] = []

    def note(pid: Stub) -> int:
        storages.append(pid)
        return _MOST_ELEMENTS  # What it says of its storage is compared afterwards.

    try:
        made = check_pickle(content, storage=note).value
        if made.kind != "call":
            raise BadRecord("its description is damaged")
        if made.name not in _REBUILDERS or len(made.items) > _REBUILDERS[made.name]:
            return None
        ((_, cls, name, _, size),) = (pid.items or () for pid in storages)
        _, offset, shape, stride, _, _, *dtypes = made.items
        shape, stride = tuple(shape.items), tuple(stride.items)
        plain = all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, size, *shape, *stride))
        if not plain or type(name) is not str or len(shape) != len(stride):
            raise BadRecord("its description is damaged")
        stored = _STORAGE_DTYPES.get(cls.name)
        dtype = getattr(torch, dtypes[0].name.removeprefix("torch."), None) if dtypes else stored
    except BadRecord:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise BadRecord(f"its description cannot be read: {error}") from error
    if stored is None or not isinstance(dtype, torch.dtype):
        return None
    layout = StoredLayout(name, dtype, size * stored.itemsize, offset, shape, stride)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * dtype.itemsize > layout.storage_bytes:
        raise BadRecord("its tensor sticks out of its storage")
    return layout


SMALL_BYTES = 1 << 16
"""Records up to this size are read whole: one system call costs more than that many bytes."""
_EDGE_BYTES = 1 << 12
"""What is read of either end of a larger record to find the values in it."""


class _RecordFiller(chunk_reads.Filler):
    """Fills rows from records; the first row of a record stands for all that are read from it.

    ``rows_of`` has all of them, by the first; ``places`` are ``[rows, 3]``, see PlacedIndex.
    """

    def __init__(self, reader: TorchDistReader, plan: LoadPlan, planner: LoadPlanner) -> None:
        index = reader.index
        table = _ending_at_the_edge(plan.table, index)
        super().__init__(plan, planner, index, reader.files, table=table)
        records = index.records(table)
        by_record: dict[int, list[int]] = {}
        for row, record in enumerate(records.tolist()):
            by_record.setdefault(record, []).append(row)
        self.rows_of = {rows[0]: rows for rows in by_record.values()}
        self.places = index.places[records]
        self._index, self._reader = index, reader

    def read_run(self, rows: Int64s, file: OpenFile, starts: Int64s, sizes: Int64s) -> bool:
        return False

    def fill(self, row: int, block: Array, start: int = 0, size: int | None = None) -> int:
        return self._fill(row, block, start, block.nbytes if size is None else size)

    def read(self, row: int, file: OpenFile, start: int) -> int:
        length = int(self.places[row, 2])
        if length <= SMALL_BYTES or self.table.is_object[row]:
            return self.fill(row, file.view(start, length))
        return self._fill(row, file, start, length)

    def _fill(self, row: int, source: Array | OpenFile, start: int, length: int) -> int:
        """Fill the rows of the record that lies here; returns their bytes."""
        key, rows = self.table.key(row), self.rows_of[row]
        record: Archive
        if isinstance(source, OpenFile):
            record = _RecordInFile(source, start, length)
        else:
            record = source[start : start + length].data
        try:
            if self.table.is_object[row]:
                content, trusted = bytes(record[:]), self._reader.trusted
                value = read_object(content, self._where(row), trusted=trusted)
                for cell in rows:
                    self.destinations.apply_bytes(cell, value)
                return 0
            dtype, shape = self.dtype(row).torch, self._stored_shape(row)
            num_bytes = math.prod(shape) * dtype.itemsize
            layout = find_tensor(record)
            if layout is not None:
                _require_form(layout.dtype, layout.shape, dtype, shape)
            if layout is None or not layout.is_contiguous:
                # Its values lie otherwise in its storage: only PyTorch can put them in order.
                tensor = deserialize(bytes(record[:]), f"the record of {key!r}")
                plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                if not plain or tensor.layout is not torch.strided or not tensor.is_cpu:
                    raise BadRecord(f"expected a plain tensor, found a {type(tensor).__name__}")
                _require_form(tensor.dtype, tuple(tensor.shape), dtype, shape)
                array = tensor_memory.as_numpy(tensor.detach().contiguous()).reshape(-1)
                source, first = array.view(np.uint8), 0
            else:
                first = start + layout.start
        except BadRecord as error:
            raise chunk_reads.damaged(
                self._where(row), key, f"a record cannot be read: {error}"
            ) from error
        if isinstance(source, OpenFile):
            return sum(chunk_reads.Filler.read(self, row, source, first) for row in rows)
        return sum(chunk_reads.Filler.fill(self, row, source, first, num_bytes) for row in rows)

    def _where(self, row: int) -> str:
        return self._reader.location_of(self.places[row])

    def _stored_shape(self, row: int) -> Ints:
        """Shape of the array in the record of a row; flattened pieces are seen without axes."""
        table, chunk = self.table, self.table.chunk(row)
        if chunk.index is None:
            return tuple(table.storage_shapes[row, : table.ndim[row]].tolist())
        box, flat = self._index.pieces[chunk.fqn][chunk.index]
        return box.shape if flat is None else (flat[1] - flat[0],)


class _RecordInFile:
    """A record in a file, of which the ends are read at once."""

    def __init__(self, file: OpenFile, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        edge = min(length, _EDGE_BYTES)
        self._ends = {at: self._read(at, edge) for at in {0, length - edge}}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self._length)
        for at, data in self._ends.items():
            if at <= begin and end <= at + len(data):
                return data[begin - at : end - at]
        return self._read(begin, end - begin)

    def _read(self, begin: int, count: int) -> bytes:
        return self._file.view(self._start + begin, count).tobytes()


def _require_form(found: torch.dtype, whole: Ints, dtype: torch.dtype, shape: Ints) -> None:
    # Megatron's flattened pieces have axes of extent 1 in front.
    axes = len(whole) - len(shape)
    if (found, whole[axes:]) != (dtype, shape) or set(whole[:axes]) - {1}:
        expected = f"{dtype} of shape {shape}"
        raise BadRecord(f"expected {expected}, found {found} of shape {whole}")


def read_object(content: bytes, where: str, *, trusted: bool) -> object:
    """The object in a record of Megatron's, which is a list of all cells that had its name."""
    value = deserialize(content, where, trusted=trusted)
    if not isinstance(value, list) or not value:
        raise BadRecord(f"expected a list with a sharded object, found {type(value).__name__}")
    return value[0]


_MOST_POSITIONS = 1 << 24


class TorchDistCommonLoadStrategy(KnownFormats, LoadCommonStrategy):
    """Reads the common state that Megatron-Core >= 0.19 and plain torch DCP keep in the checkpoint.

    Megatron's is one object. Plain DCP's is every value that is not a tensor, nested as it was in
    the state dict that was saved.

    Example:
        >>> TorchDistCommonLoadStrategy().check_backend_compatibility("torch_dist")
    """

    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("torch_dist", 1)})

    def load_common(self, checkpoint_dir: PathOrStr) -> StateDict:
        folder = as_location(checkpoint_dir)
        metadata = read_dcp_metadata(folder)
        if COMMON_STATE_CELL in metadata.values:
            common = self._read(folder, metadata, COMMON_STATE_CELL)
            if not isinstance(common, dict):
                raise _damaged("not a dict", COMMON_STATE_CELL, found=type(common).__name__)
            return common
        plain = [key for key in metadata.values if cell_named(key) is None]
        return nested(
            {metadata.paths.get(key, (key,)): self._read(folder, metadata, key) for key in plain}
        )

    def _read(self, folder: Location, metadata: DcpMetadata, key: str) -> Any:
        place = metadata.places.get((key, None))
        if place is None:
            raise _damaged("an object is stored nowhere", key, path=str(folder))
        where = f"{folder / place.file}, bytes from {place.offset} on ({key!r})"
        content = chunk_reads.read_extent(chunk_reads.Extent(folder, *place), key)
        if key != COMMON_STATE_CELL:
            return deserialize(content, where, trusted=self.trusted)
        try:
            return read_object(content, where, trusted=self.trusted)
        except BadRecord as error:
            raise _damaged(f"cannot be read: {error}", key, path=where) from error


def _damaged(problem: str, key: str, **place: str) -> CorruptCheckpointError:
    finding = Finding(problem, key, **place)  # type: ignore[arg-type]
    return CorruptCheckpointError("the common state is damaged", [finding])


ABSENT: Any = object()
"""A value that is stored elsewhere, and only keeps its position in a list."""


class _Nest(dict[Any, Any]):
    """A container on the way; no value that was stored."""

    @property
    def length(self) -> int:
        """Length of the list that it will be; 0 for a dict."""
        return max(self) + 1 if all(type(step) is int for step in self) else 0


def nested(values: Mapping[StatePath, Any]) -> dict[Any, Any]:
    """Values by path as a nest of dicts and lists.

    Positions become those of a list. What DCP stored elsewhere (the tensors) leaves None there,
    as in the common state of every other checkpoint.

    Raises:
        StateMismatchError: if one path goes through the value at another.
        CorruptCheckpointError: if the lists are longer than those of any state dict.
    """
    tree, below = _Nest(), list[_Nest]()
    for path, value in values.items():
        node: Any = tree
        for step in path[:-1]:
            if isinstance(node, _Nest):
                if step not in node:
                    below.append(node.setdefault(step, _Nest()))
                node = node[step]
        if not isinstance(node, _Nest) or path[-1] in node:
            finding = Finding("two values at one place", ".".join(map(str, path)))
            raise StateMismatchError("the values in the checkpoint cannot be nested", [finding])
        node[path[-1]] = value
    # What a file says is not yet memory: one number may ask for more than there is.
    length = sum(nest.length for nest in below)
    if length > _MOST_POSITIONS:
        finding = Finding("lists longer than those of any state dict", found=f"{length} positions")
        raise CorruptCheckpointError("the values in the checkpoint cannot be nested", [finding])
    return _present(tree)


def _present(nest: _Nest) -> dict[Any, Any]:
    """The values that are stored here, and containers that hold such."""
    found = {step: _rebuilt(v) if isinstance(v, _Nest) else v for step, v in nest.items()}
    return {step: value for step, value in found.items() if value is not ABSENT}


def _rebuilt(nest: _Nest) -> Any:
    values, length = _present(nest), nest.length
    if not values:
        return ABSENT
    return [*map(values.get, range(length))] if length else values


class TorchDistReader(StorageReader):
    """Reads what torch DCP, Megatron-Core and TorchDistWriter write."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self.index: PlacedIndex = PlacedIndex([], [], [], [])

    def read_metadata(self) -> PlacedIndex:
        return placed_index(read_dcp_metadata(self.checkpoint_dir), self.checkpoint_dir)

    def set_up_storage_reader(self, metadata: Index) -> None:
        # An index that a planner has made does not say where the chunks are.
        self.index = metadata if isinstance(metadata, PlacedIndex) else self.read_metadata()

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        return [DCP_METADATA_NAME]

    def read_box(
        self, tensor: StoredTensor, box: Box, memory: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        found = chunk_reads.chunk_with(tensor, box)
        if found is None or not isinstance(self.checkpoint_dir, Path):
            return None
        grid, dtype = tensor.grid, tensor.dtype
        row = self.index.first_row[tensor.key] + ravel_offset(found[0], grid.counts)
        place, shape = self.index.place(row), grid.box(found[0]).shape
        with suppress(OSError, EOFError, BadRecord), self.files.open(place.file) as file:
            file.require(place.offset + place.length, is_all=False)
            layout = find_tensor(_RecordInFile(file, place.offset, place.length))
            if layout is not None and layout.is_contiguous:
                _require_form(layout.dtype, layout.shape, dtype.torch, shape)
                window, start = Window(0, shape, found[1]), place.offset + layout.start
                return chunk_reads.read_single(self.files, place.file, start, window, dtype, memory)
        return None

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        place = self.index.place(self.index.cell_row(key, cell))
        return chunk_reads.read_extent(chunk_reads.Extent(self.checkpoint_dir, *place), key)

    def location(self, chunk: MetadataIndex) -> str:
        return self.location_of(self.index.places[self.index.row(chunk)])

    def location_of(self, place: Int64s) -> str:
        """Where a record is, for messages."""
        return f"{self.checkpoint_dir / self.index.files[place[0]]}, bytes from {place[1]} on"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        found = (self.index.place(self.index.row(chunk)) for chunk in chunks)
        return [ChunkPlace(p.file, p.length, p.length <= SMALL_BYTES) for p in found]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        filler = _RecordFiller(self, plan, planner)
        self._require_files(filler.places[:, 0], plan.table)
        rows = np.array([*filler.rows_of], dtype=np.int64)
        reads = chunk_reads.ChunkReads(rows, self.index.files, *filler.places[rows].T)
        chunk_reads.read_chunks(reads, filler, self.files, report=self.report)
        return done(None)

    def _require_files(self, numbers: Int64s, table: ReadTable) -> None:
        """Make sure that the files are there that hold the record of each row."""
        files = self.index.files
        missing = [n for n in np.unique(numbers).tolist() if self.files.size_of(files[n]) is None]
        lost = np.flatnonzero(np.isin(numbers, missing)).tolist()
        findings = [
            Finding("its file is missing", key, path=str(self.checkpoint_dir / file))
            for file, key in sorted({(files[numbers[row]], table.key(row)) for row in lost})
        ]
        CorruptCheckpointError.raise_if(findings, "the checkpoint is damaged")


def _ending_at_the_edge(table: ReadTable, index: Index) -> ReadTable:
    """The rows as they lie here: a plan takes the chunks at the edge of a grid for full ones."""
    rows = np.flatnonzero((table.pieces < 0) & ~table.is_object)
    shapes, _ = index.shapes_of([table.names[key] for key in table.keys[rows].tolist()])
    width = table.lengths.shape[1]
    whole = padded_rows(shapes, 1, width)[:, :width]
    ends = table.storage_shapes.copy()
    ends[rows] = np.minimum(ends[rows], whole - table.chunk_offsets[rows])
    return replace(table, storage_shapes=ends)
