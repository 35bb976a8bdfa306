"""The index: what a checkpoint holds, and the file that says so.

One small JSON file of columns, whatever the number of ranks. It is read by rank 0, and only the
rows that a load asks for become objects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import element_types
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.geometry import Box, ChunkGrid, Ints
from dist_checkpointing.format.index_columns import (
    extents,
    fingerprints_of_json,
    json_text,
    optional_string,
    pieces_of_json,
    pieces_text,
    shapes,
    strings,
    without_pieces,
)
from dist_checkpointing.format.pieces import (
    MAX_AXES,
    Int64s,
    PieceColumns,
    Pieces,
    ints_from_json,
    padded_rows,
)
from dist_checkpointing.format.seal import SealedFile

__all__ = [
    "FORMAT",
    "FORMAT_MINOR",
    "INDEX_NAME",
    "MAX_AXES",
    "Index",
    "PieceColumns",
    "Pieces",
    "StoredTensor",
    "ints_from_json",
    "read_index",
    "write_index",
]

INDEX_NAME = ".dckpt/index.json"
FORMAT = "dist_checkpointing.index"
FORMAT_MINOR = 0
_MAX_INDEX_BYTES = 1 << 32
T = TypeVar("T")
_CHECKSUM_BYTES = len('{"checksum":"0123456789abcdef",')


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One global tensor as stored: either on a chunk grid, or as pieces."""

    key: str
    dtype: element_types.DType
    global_shape: Ints
    chunk_shape: Ints | None
    pieces: Pieces | None = None

    @cached_property
    def grid(self) -> ChunkGrid:
        """The chunk grid; only for tensors that have one."""
        assert self.chunk_shape is not None
        return ChunkGrid(self.global_shape, self.chunk_shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.global_shape) * self.dtype.itemsize

    @property
    def num_parts(self) -> int:
        """Number of chunks or pieces."""
        return math.prod(self.grid.counts) if self.pieces is None else len(self.pieces)

    def parts(self) -> Iterator[tuple[Box, tuple[int, int] | None]]:
        """Box and flat range of each chunk, in C order, or piece."""
        if self.pieces is not None:
            yield from self.pieces
            return
        grid = self.grid
        for place in itertools.product(*map(range, grid.counts)):
            yield grid.box(place), None

    @classmethod
    def undivided(cls, key: str, dtype: element_types.DType, shape: Sequence[int]) -> StoredTensor:
        """A tensor that is stored as one chunk."""
        return cls(key, dtype, tuple(shape), tuple(max(1, extent) for extent in shape))


@dataclass(frozen=True, eq=False)
class Index(Mapping[str, StoredTensor]):
    """Key -> stored tensor, plus the grids of sharded objects that the backend holds itself.

    Columns of equal length, one entry a tensor; a tensor becomes an object when it is asked for.

    Attributes:
        keys_column: The keys.
        dtype_column: Names of the dtypes.
        global_shape_column: Global shapes.
        chunk_shape_column: Chunk shapes; None for tensors that are stored as pieces.
        pieces: Pieces of the tensors that are stored as pieces.
        objects: Grids of the sharded objects that the backend holds itself.
        codec: Name of the compression of all chunks, if there is one.
        fingerprints: Fingerprints of the tensors by key, if they were kept; see ``fingerprints``.
    """

    keys_column: Sequence[str]
    dtype_column: Sequence[str]
    global_shape_column: Sequence[Sequence[int]]
    chunk_shape_column: Sequence[Sequence[int] | None]
    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    objects: Mapping[str, Ints] = field(default_factory=dict)
    codec: str | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tensors: Iterable[StoredTensor], objects: Mapping[str, Ints] | None = None
    ) -> Index:
        """The index of these tensors."""
        rows = list(tensors)
        return cls(
            [t.key for t in rows],
            [t.dtype.name for t in rows],
            [t.global_shape for t in rows],
            [t.chunk_shape for t in rows],
            {t.key: t.pieces for t in rows if t.pieces is not None},
            dict(objects or {}),
        )

    @cached_property
    def _row(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self.keys_column)}

    @cached_property
    def _asked_for(self) -> dict[str, StoredTensor]:
        return {}

    def __getitem__(self, key: str) -> StoredTensor:
        tensor = self._asked_for.get(key)
        if tensor is None:
            row = self._row[key]
            chunk_shape = self.chunk_shape_column[row]
            tensor = self._asked_for[key] = StoredTensor(
                key,
                element_types.from_name(self.dtype_column[row]),
                tuple(self.global_shape_column[row]),
                None if chunk_shape is None else tuple(chunk_shape),
                self.pieces.get(key),
            )
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __getstate__(self) -> dict[str, Any]:
        # What is only remembered does not travel.
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _remembered(self, what: str, keys: Iterable[str], find: Callable[[], T]) -> T:
        """What was found for the same tuple of keys, for which the steps of a load all ask."""
        if type(keys) is not tuple:
            return find()
        last, found = self.__dict__.get("_last", (None, {}))
        if last is not keys:
            found = {}
            self.__dict__["_last"] = (keys, found)
        if what not in found:
            found[what] = find()
        known: T = found[what]
        return known

    def rows_of(self, keys: Iterable[str]) -> Int64s:
        """Position of each key in the columns; -1 for a key that is not there."""

        def find() -> Int64s:
            return np.fromiter(map(self._row.get, keys, itertools.repeat(-1)), dtype=np.int64)

        return self._remembered("rows", keys, find)

    @cached_property
    def has_grid(self) -> npt.NDArray[np.bool_]:
        """Which tensors have a chunk grid."""
        return np.array([chunk is not None for chunk in self.chunk_shape_column], dtype=np.bool_)

    @cached_property
    def global_shapes(self) -> Int64s:
        """``[tensors, axes]``: global shapes; further axes are 1."""
        return padded_rows(self.global_shape_column, 1, 0)

    @cached_property
    def chunk_shapes(self) -> Int64s:
        """``[tensors, axes]``: chunk shapes; further axes, and all without a grid, are 1."""
        rows = zip(self.global_shape_column, self.chunk_shape_column, strict=True)
        chunks = [(1,) * len(shape) if chunk is None else chunk for shape, chunk in rows]
        return padded_rows(chunks, 1, 0)

    def chunk_shape(self, key: str) -> Sequence[int] | None:
        """Chunk shape of a tensor; None if it is stored as pieces, or not at all."""
        row = self._row.get(key)
        return None if row is None else self.chunk_shape_column[row]

    def dtype_of(self, key: str) -> element_types.DType:
        """Dtype of a tensor that it holds."""
        return element_types.from_name(self.dtype_column[self._row[key]])

    def dtypes_of(self, keys: Iterable[str]) -> tuple[Int64s, list[element_types.DType | None]]:
        """Dtype of each key as a position in the list; that of None for a key that is not there."""

        def find() -> tuple[Int64s, list[element_types.DType | None]]:
            rows, column = self.rows_of(keys).tolist(), self.dtype_column
            names = [column[row] if row >= 0 else None for row in rows]
            number = {name: i for i, name in enumerate(dict.fromkeys(names))}
            numbers = np.fromiter(map(number.__getitem__, names), dtype=np.int64, count=len(names))
            types = [None if name is None else element_types.from_name(name) for name in number]
            return numbers, types

        return self._remembered("dtypes", keys, find)

    def itemsizes_of(self, keys: Iterable[str]) -> Int64s:
        """Bytes of an element of each tensor; 0 for a key that is not there."""
        numbers, types = self.dtypes_of(keys)
        sizes = [0 if dtype is None else dtype.itemsize for dtype in types]
        return np.array(sizes, dtype=np.int64)[numbers]

    def shapes_of(
        self, keys: Iterable[str]
    ) -> tuple[list[Sequence[int]], list[Sequence[int] | None]]:
        """Global shapes and chunk shapes (None where there are pieces) of tensors that it holds."""

        def find() -> tuple[list[Sequence[int]], list[Sequence[int] | None]]:
            found = self.rows_of(keys)
            assert not (found < 0).any(), "a tensor that it does not hold"
            rows = found.tolist()
            shapes, chunks = self.global_shape_column, self.chunk_shape_column
            return [shapes[row] for row in rows], [chunks[row] for row in rows]

        return self._remembered("shapes", keys, find)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_column)

    def __len__(self) -> int:
        return len(self.keys_column)

    def without(self, dropped: Iterable[str]) -> Index:
        """The index with some tensors left out."""
        gone = set(dropped)
        kept = Index.of((self[key] for key in self if key not in gone), self.objects)
        fingerprints = {key: text for key, text in self.fingerprints.items() if key not in gone}
        return replace(kept, codec=self.codec, fingerprints=fingerprints)

    def to_json(self) -> bytes:
        """The bytes of the index file."""
        begin = {
            "format": FORMAT,
            "format_minor": FORMAT_MINOR,
            "keys": [*self.keys_column],
            "dtypes": [*self.dtype_column],
            "global_shapes": [*self.global_shape_column],
            "chunk_shapes": [*self.chunk_shape_column],
        }
        end: dict[str, Any] = {"objects": dict(self.objects), "codec": self.codec}
        if self.fingerprints:
            # Readers that do not know it pass over it.
            end["fingerprints"] = [self.fingerprints.get(key) for key in self.keys_column]
        text = f'{json_text(begin)[:-1]},"pieces":{pieces_text(self.pieces)},{json_text(end)[1:]}'
        body = text.encode()
        # Still one JSON object, and a flipped digit in a shape does not go unnoticed.
        return b'{"checksum":"%016x",' % xxhash.xxh3_64_intdigest(body) + body[1:]

    @classmethod
    @paused_collector()
    def from_json(cls, data: bytes, path: str = INDEX_NAME) -> Index:
        """Read and check the bytes of an index file.

        Raises:
            CorruptCheckpointError: if they are not one.
            UnsupportedFormatError: if they are of a future format or hold an unknown dtype.
        """
        message = "the index of the checkpoint cannot be read"
        with local_folder.parsing(
            message, path, remedy="Use another checkpoint, or restore this file."
        ):
            body = b"{" + data[_CHECKSUM_BYTES:]
            head = b'{"checksum":"%016x",' % xxhash.xxh3_64_intdigest(body)
            is_sound = data.startswith(head)
            # What is not as it was written may have its pieces anywhere.
            text, tables = without_pieces(data) if is_sound else (data, [])
            content = local_folder.parse_json(text)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError("not an index of dist_checkpointing")
            if not is_sound:
                raise ValueError("the checksum of the index differs")
            keys = strings(content["keys"])
            index = cls(
                keys,
                strings(content["dtypes"]),
                shapes(keys, content["global_shapes"]),
                shapes(keys, content["chunk_shapes"], optional=True),
                pieces_of_json(content["pieces"], tables),
                {key: tuple(extents(key, shape)) for key, shape in content["objects"].items()},
                optional_string(content["codec"]),
                fingerprints_of_json(keys, content.get("fingerprints")),
            )
            index._check()
        return index

    def _check(self) -> None:
        columns = (self.dtype_column, self.global_shape_column, self.chunk_shape_column)
        if any(len(column) != len(self) for column in columns):
            raise ValueError("columns of different length")
        if len(self._row) != len(self):
            raise ValueError("a key appears twice")
        for name in set(self.dtype_column):
            element_types.from_name(name)
        rows = zip(self.keys_column, self.global_shape_column, self.chunk_shape_column, strict=True)
        if self._is_plain():
            return
        for key, shape, chunk in rows:
            if chunk is None:
                if key not in self.pieces:
                    raise ValueError(f"{key!r} needs either a chunk grid or pieces")
                pieces = self.pieces[key]
                if pieces.offsets.shape[1:] != (len(shape),):
                    raise ValueError(f"{key!r} has pieces of another number of axes")
                if not pieces.are_inside(shape):
                    raise ValueError(f"{key!r} has pieces outside of it")
            elif key in self.pieces:
                raise ValueError(f"{key!r} needs either a chunk grid or pieces")
            elif len(chunk) != len(shape) or 0 in chunk:
                raise ValueError(f"{key!r} has chunk shape {chunk} for shape {shape}")

    def _is_plain(self) -> bool:
        """Whether all tensors have a chunk grid that fits."""
        shapes, chunks = self.global_shape_column, self.chunk_shape_column
        return (
            not self.pieces
            and None not in chunks
            and list(map(len, shapes)) == list(map(len, chunks))  # type: ignore[arg-type]
            and 0 not in set(itertools.chain.from_iterable(chunks))  # type: ignore[arg-type]
        )


def write_index(
    index: Index,
    folder: Location,
    durability: local_folder.Durability = local_folder.Durability.FSYNC,
) -> SealedFile:
    """Write the index file of the checkpoint in ``folder``, atomically.

    A power cut takes it until ``.dckpt`` is synced, as a commit does.
    """
    path = folder / INDEX_NAME
    location.make_folder(path.parent)
    data = index.to_json()
    location.write_content(path, data, durability)
    return SealedFile.of_bytes(INDEX_NAME, data)


def read_index(folder: Location) -> Index | None:
    """The index file of the checkpoint in ``folder``, or None if it has none."""
    path = folder / INDEX_NAME
    if not location.is_there(path):
        return None
    return Index.from_json(location.read_bytes(path, _MAX_INDEX_BYTES), str(path))
