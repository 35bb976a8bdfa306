"""The index of a torch_dist checkpoint, and where in its files each part of it lies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import COMMON_STATE_FNAME
from dist_checkpointing.format.geometry import Box, Ints, ravel_offset
from dist_checkpointing.format.index import Index, Pieces, StoredTensor
from dist_checkpointing.format.leftovers import DCP_METADATA_NAME
from dist_checkpointing.mapping import ShardedObject, tensor_memory
from dist_checkpointing.planning import MetadataIndex, ReadTable
from dist_checkpointing.strategies.torch_dist.flattened import piece_of_chunk
from dist_checkpointing.strategies.torch_dist.metadata import DcpMetadata, DcpTensor, Place

COMMON_STATE_CELL = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Where Megatron-Core keeps the common state since 0.19, when it has no ``common.pt``."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlacedIndex(Index):
    """An index that also knows where every chunk is, so that only rank 0 reads ``.metadata``.

    ``places`` are position in ``files``, offset and length in bytes. Chunks of a tensor follow its
    first row in the order of the grid or of the pieces; cells of objects are found by unique key.
    """

    files: Sequence[str] = ()
    places: Int64s = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    first_row: Mapping[str, int] = field(default_factory=dict)
    cell_rows: Mapping[str, int] = field(default_factory=dict)

    def row(self, chunk: MetadataIndex) -> int:
        tensor = self[chunk.fqn]
        if tensor.pieces is not None:
            assert chunk.index is not None
            return self.first_row[chunk.fqn] + chunk.index
        assert chunk.offset is not None
        grid = tensor.grid
        return self.first_row[chunk.fqn] + ravel_offset(grid.index_at(chunk.offset), grid.counts)

    def records(self, table: ReadTable) -> Int64s:
        """The rows of the stored chunks and cells that the rows of a load plan read."""
        firsts = [self.first_row.get(key, 0) for key in table.names]
        found = np.array(firsts, dtype=np.int64)[table.keys] + np.maximum(table.pieces, 0)
        on_grid = (table.pieces < 0) & ~table.is_object
        # What begins at the origin is the first chunk.
        for row in np.flatnonzero(on_grid & table.chunk_offsets.any(axis=1)).tolist():
            found[row] = self.row(table.chunk(row))
        for row in np.flatnonzero(table.is_object).tolist():
            key, cell = table.key(row), table.chunk(row).offset
            assert cell is not None
            leaf = ShardedObject(key, None, self.objects[key], cell)
            found[row] = self.cell_rows[leaf.unique_key]
        return found

    def place(self, row: int) -> Place:
        file, offset, length = self.places[row].tolist()
        return Place(self.files[file], offset, length)


def placed_index(metadata: DcpMetadata, folder: Location) -> PlacedIndex:
    """What ``.metadata`` says, as an index.

    Raises:
        CorruptCheckpointError: if it contradicts itself.
        UnsupportedFormatError: if it holds a dtype that is not read.
    """
    path = str(folder / DCP_METADATA_NAME)
    known = {row.torch for row in tensor_memory.DTYPES}
    unknown = [
        Finding("unknown stored dtype", key, found=tensor.dtype, path=path)
        for key, tensor in metadata.tensors.items()
        if tensor.dtype not in known
    ]
    if unknown:
        raise UnsupportedFormatError("the checkpoint holds dtypes we cannot read", unknown)
    tensors: list[StoredTensor] = []
    rows: list[Place] = []
    first_row: dict[str, int] = {}
    findings: list[Finding] = []
    for key in sorted(metadata.tensors):
        try:
            tensor, chunks = _stored(key, metadata.tensors[key])
            first_row[key] = len(rows)
            rows += [metadata.places[key, offset] for offset in chunks]
            tensors.append(tensor)
        except KeyError as error:
            findings.append(Finding("a chunk is stored nowhere", key, found=error, path=path))
        except ValueError as error:
            findings.append(Finding(str(error), key, path=path))
    is_common = not location.is_file(folder / COMMON_STATE_FNAME)
    cells = [key for key in metadata.values if not (is_common and key == COMMON_STATE_CELL)]
    objects, named, contradictions = _objects(cells, path)
    cell_rows = {}
    for key in named:
        place = metadata.places.get((key, None))
        if place is None:
            findings.append(Finding("an object is stored nowhere", key, path=path))
        else:
            cell_rows[key] = len(rows)
            rows.append(place)
    findings += contradictions
    if findings:
        raise CorruptCheckpointError("the metadata of the checkpoint contradicts itself", findings)
    files = {name: number for number, name in enumerate(dict.fromkeys(row.file for row in rows))}
    table = [(files[row.file], row.offset, row.length) for row in rows]
    plain = Index.of(tensors, objects)
    columns = {f.name: getattr(plain, f.name) for f in fields(Index)}
    return PlacedIndex(
        **columns,
        files=tuple(files),
        places=np.array(table, dtype=np.int64).reshape(-1, 3),
        first_row=first_row,
        cell_rows=cell_rows,
    )


def _stored(key: str, tensor: DcpTensor) -> tuple[StoredTensor, list[Ints]]:
    """A tensor, and the offsets by which DCP knows its chunks, in the order of the index."""
    dtype = tensor_memory.from_torch(tensor.dtype)
    # Some writers list empty chunks; they hold nothing and may share the offset of a real one.
    chunks = [(offsets, sizes) for offsets, sizes in tensor.chunks if 0 not in sizes]
    if tensor.flattened_from is not None:
        shape = tensor.flattened_from
        rows = [piece_of_chunk(shape, tensor.size, *chunk) for chunk in chunks]
        pieces = Pieces.of(len(shape), rows)
        stored = StoredTensor(key, dtype, shape, None, pieces)
        return stored, [offsets for offsets, _ in chunks]
    if 0 in tensor.size:
        shape = tuple(max(extent, 1) for extent in tensor.size)
        return StoredTensor(key, dtype, tensor.size, shape), []
    in_grid = _grid_order(tensor.size, chunks)
    if in_grid is not None:
        shape, order = in_grid
        return StoredTensor(key, dtype, tensor.size, shape), [chunks[i][0] for i in order]
    pieces = Pieces.of(len(tensor.size), [(Box(*chunk), None) for chunk in chunks])
    stored = StoredTensor(key, dtype, tensor.size, None, pieces)
    return stored, [offsets for offsets, _ in chunks]


def _grid_order(
    shape: Ints, chunks: Sequence[tuple[Ints, Ints]]
) -> tuple[Ints, Iterable[int]] | None:
    """The chunk shape and the positions of the chunks in order of the grid, if they make one."""
    if len(chunks) == 1 and chunks[0][1] == shape:
        return shape, (0,)
    if not chunks or not shape:
        return None
    offsets = np.array([o for o, _ in chunks], dtype=np.int64)
    sizes = np.array([n for _, n in chunks], dtype=np.int64)
    chunk = sizes.max(axis=0)
    whole = np.array(shape, dtype=np.int64)
    counts = -(-whole // chunk)
    fits = not (offsets % chunk).any() and (sizes == np.minimum(chunk, whole - offsets)).all()
    if not fits or math.prod(counts.tolist()) != len(chunks):
        return None
    numbers = np.ravel_multi_index(tuple((offsets // chunk).T), tuple(counts.tolist()))
    order = np.argsort(numbers, kind="stable")
    if not np.array_equal(numbers[order], np.arange(len(chunks))):
        return None
    return tuple(chunk.tolist()), order.tolist()


def _objects(keys: Iterable[str], path: str) -> tuple[dict[str, Ints], list[str], list[Finding]]:
    """Grids of the sharded objects, the names of all their cells, and what does not fit.

    A value whose name is not that of a cell is one that plain DCP saved: common state.
    """
    grids: dict[str, set[Ints]] = {}
    cells: dict[str, list[str]] = {}
    for key in keys:
        leaf = cell_named(key)
        if leaf is not None:
            grids.setdefault(leaf.key, set()).add(tuple(leaf.global_shape))
            cells.setdefault(leaf.key, []).append(key)
    findings = []
    for key, shapes in grids.items():
        expected = {math.prod(shape) for shape in shapes}
        if len(shapes) > 1 or expected != {len(cells[key])}:
            found = f"{len(cells[key])} cells of {sorted(shapes)}"
            findings.append(Finding("not every cell once", key, found=found, path=path))
    objects = {key: next(iter(shapes)) for key, shapes in sorted(grids.items())}
    return objects, [name for names in cells.values() for name in names], findings


def unique_keys(index: Index) -> Iterator[str]:
    """The names of all cells of all sharded objects."""
    for key, shape in index.objects.items():
        for cell in itertools.product(*map(range, shape)):
            yield ShardedObject(key, None, shape, cell).unique_key


def cell_named(name: str) -> ShardedObject | None:
    """The cell of a sharded object that a name means; None if it is a name of another kind."""
    try:
        leaf = ShardedObject.empty_from_unique_key(name)
    except InvalidShardingError:
        return None
    inside = all(0 <= i < n for i, n in zip(leaf.global_offset, leaf.global_shape, strict=True))
    # A number may be written in several ways, but a cell has one name.
    return leaf if inside and leaf.unique_key == name else None
