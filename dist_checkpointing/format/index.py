"""The index: what a checkpoint holds, and the file that says so.

One small JSON file of columns, whatever the number of ranks. It is read by one rank and shared, and
only the rows that a load asks for become objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.format import element_types
from dist_checkpointing.format.geometry import Box, ChunkGrid, Ints

INDEX_NAME = ".dckpt/index.json"
FORMAT = "dist_checkpointing.index"
FORMAT_MINOR = 0
_MAX_INDEX_BYTES = 1 << 32
_MAX_EXTENT = 1 << 62
MAX_AXES = 64
"""More axes than that no array of numpy has."""
_ONLY_INT = frozenset([int])
_CHECKSUM_BYTES = len('{"checksum":"0123456789abcdef",')


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Boxes of a tensor that are stored each on its own, because there is no chunk grid.

    Attributes:
        offsets: ``[pieces, axes]``, in elements of the global tensor.
        shapes: ``[pieces, axes]``.
        flat: ``[pieces, 2]``; a piece with ``start >= 0`` holds only elements ``start .. stop`` of
            the C-order flattening of its box, as a 1-D array.
    """

    offsets: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int64]
    flat: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def of(cls, ndim: int, pieces: Iterable[tuple[Box, tuple[int, int] | None]]) -> Pieces:
        """A table of the given boxes and flat ranges."""
        rows = list(pieces)
        return cls(
            np.array([box.offset for box, _ in rows], dtype=np.int64).reshape(len(rows), ndim),
            np.array([box.shape for box, _ in rows], dtype=np.int64).reshape(len(rows), ndim),
            np.array([flat or (-1, -1) for _, flat in rows], dtype=np.int64).reshape(-1, 2),
        )

    @classmethod
    def from_lists(cls, offsets: Any, shapes: Any, flat: Any) -> Pieces:
        """The table from three lists as stored.

        Raises:
            ValueError: if they do not fit together.
        """
        rows = [[ints_from_json(row) for row in column] for column in (offsets, shapes)]
        ranges = [(-1, -1) if row == [-1, -1] else tuple(ints_from_json(row)) for row in flat]
        if not len(rows[0]) == len(rows[1]) == len(ranges) or not ranges:
            raise ValueError("pieces of different length, or none")
        table = cls(
            np.array(rows[0], dtype=np.int64).reshape(len(ranges), -1),
            np.array(rows[1], dtype=np.int64).reshape(len(ranges), -1),
            np.array(ranges, dtype=np.int64).reshape(len(ranges), 2),
        )
        if table.offsets.shape != table.shapes.shape:
            raise ValueError("offsets and shapes with different axes")
        sizes = [math.prod(shape) for shape in rows[1]]
        for (start, stop), size in zip(ranges, sizes, strict=True):
            if start >= 0 and not start <= stop <= size:
                raise ValueError(f"flat range {start}:{stop} of a box with {size} elements")
        return table

    def are_inside(self, shape: Sequence[int]) -> bool:
        """Whether all pieces lie in a tensor of this shape."""
        return bool((self.offsets + self.shapes <= np.array(shape, dtype=np.int64)).all())

    def __getitem__(self, row: int) -> tuple[Box, tuple[int, int] | None]:
        start, stop = self.flat[row].tolist()
        box = Box(tuple(self.offsets[row].tolist()), tuple(self.shapes[row].tolist()))
        return box, None if start < 0 else (start, stop)

    def __iter__(self) -> Iterator[tuple[Box, tuple[int, int] | None]]:
        rows = zip(self.offsets.tolist(), self.shapes.tolist(), self.flat.tolist(), strict=True)
        for offset, shape, (start, stop) in rows:
            yield Box(tuple(offset), tuple(shape)), None if start < 0 else (start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One global tensor as stored: either on a chunk grid, or as pieces."""

    key: str
    dtype: element_types.DType
    global_shape: Ints
    chunk_shape: Ints | None
    pieces: Pieces | None = None

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid; only for tensors that have one."""
        assert self.chunk_shape is not None
        return ChunkGrid(self.global_shape, self.chunk_shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.global_shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Index(Mapping[str, StoredTensor]):
    """Key -> stored tensor, plus the grids of sharded objects that the backend holds itself.

    Columns of equal length, one entry a tensor; ``pieces`` only for tensors without a chunk grid.
    ``codec`` names the compression of all chunks, if there is one.
    """

    keys_column: Sequence[str]
    dtype_column: Sequence[str]
    global_shape_column: Sequence[Sequence[int]]
    chunk_shape_column: Sequence[Sequence[int] | None]
    pieces: Mapping[str, Pieces] = field(default_factory=dict)
    objects: Mapping[str, Ints] = field(default_factory=dict)
    codec: str | None = None

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

    def chunk_shape(self, key: str) -> Sequence[int] | None:
        """Chunk shape of a tensor; None if it is stored as pieces, or not at all."""
        row = self._row.get(key)
        return None if row is None else self.chunk_shape_column[row]

    def dtype_of(self, key: str) -> element_types.DType:
        """Dtype of a tensor that it holds."""
        return element_types.from_name(self.dtype_column[self._row[key]])

    def shapes_of(
        self, keys: Iterable[str]
    ) -> tuple[list[Sequence[int]], list[Sequence[int] | None]]:
        """Global shapes and chunk shapes (None where there are pieces) of tensors that it holds."""
        rows = list(map(self._row.__getitem__, keys))
        shapes, chunks = self.global_shape_column, self.chunk_shape_column
        return [shapes[row] for row in rows], [chunks[row] for row in rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_column)

    def __len__(self) -> int:
        return len(self.keys_column)

    def without(self, dropped: Iterable[str]) -> Index:
        """The index with some tensors left out."""
        gone = set(dropped)
        kept = Index.of((self[key] for key in self if key not in gone), self.objects)
        return replace(kept, codec=self.codec)

    def to_json(self) -> bytes:
        """The bytes of the index file."""
        pieces = {
            key: {
                "offsets": table.offsets.tolist(),
                "shapes": table.shapes.tolist(),
                "flat": table.flat.tolist(),
            }
            for key, table in self.pieces.items()
        }
        content = {
            "format": FORMAT,
            "format_minor": FORMAT_MINOR,
            "keys": list(self.keys_column),
            "dtypes": list(self.dtype_column),
            "global_shapes": [list(shape) for shape in self.global_shape_column],
            "chunk_shapes": [s if s is None else list(s) for s in self.chunk_shape_column],
            "pieces": pieces,
            "objects": {key: list(shape) for key, shape in self.objects.items()},
            "codec": self.codec,
        }
        body = json.dumps(content, separators=(",", ":")).encode()
        # Still one JSON object, and a flipped digit in a shape does not go unnoticed.
        return b'{"checksum":"%016x",' % xxhash.xxh3_64_intdigest(body) + body[1:]

    @classmethod
    def from_json(cls, data: bytes, path: str = INDEX_NAME) -> Index:
        """Read and check the bytes of an index file.

        Raises:
            CorruptCheckpointError: if they are not one.
            UnsupportedFormatError: if they are of a future format or hold an unknown dtype.
        """
        try:
            content = local.parse_json(data)
        except ValueError as error:
            raise _corrupt(f"not JSON: {error}", path) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise _corrupt("not an index of dist_checkpointing", path)
        body = b"{" + data[_CHECKSUM_BYTES:]
        if content.get("checksum") != f"{xxhash.xxh3_64_intdigest(body):016x}":
            raise _corrupt("the checksum of the index differs", path)
        try:
            keys = _strings(content["keys"])
            index = cls(
                keys,
                _strings(content["dtypes"]),
                _shapes(keys, content["global_shapes"]),
                _shapes(keys, content["chunk_shapes"], optional=True),
                {
                    key: Pieces.from_lists(table["offsets"], table["shapes"], table["flat"])
                    for key, table in content["pieces"].items()
                },
                {key: tuple(_extents(key, shape)) for key, shape in content["objects"].items()},
                _optional_string(content["codec"]),
            )
            index._check()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _corrupt(f"{type(error).__name__}: {error}", path) from error
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
        for key, shape, chunk in rows:
            if (chunk is None) == (key not in self.pieces):
                raise ValueError(f"{key!r} needs either a chunk grid or pieces")
            if chunk is not None and (len(chunk) != len(shape) or 0 in chunk):
                raise ValueError(f"{key!r} has chunk shape {chunk} for shape {shape}")
            if key in self.pieces and self.pieces[key].offsets.shape[1:] != (len(shape),):
                raise ValueError(f"{key!r} has pieces of another number of axes")
            if key in self.pieces and not self.pieces[key].are_inside(shape):
                raise ValueError(f"{key!r} has pieces outside of it")


def _corrupt(problem: str, path: str) -> CorruptCheckpointError:
    finding = Finding(problem, path=path, remedy="Use another checkpoint, or restore this file.")
    return CorruptCheckpointError("the index of the checkpoint cannot be read", [finding])


def _strings(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("expected a list of strings")
    return values


def _shapes(keys: Sequence[str], column: Any, *, optional: bool = False) -> list[Any]:
    """A column of shapes, one a key; None stays if it is optional."""
    if not isinstance(column, list) or len(column) != len(keys):
        raise ValueError("columns of different length")
    return [
        None if shape is None and optional else _extents(key, shape)
        for key, shape in zip(keys, column, strict=True)
    ]


def _extents(key: str, shape: Any) -> list[int]:
    try:
        return ints_from_json(shape)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


def _optional_string(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"expected a string, found {value!r}")
    return value


def ints_from_json(values: Any) -> list[int]:
    """A list of shapes or offsets as it came out of a JSON file.

    Raises:
        ValueError: if it holds anything but integers that can be extents.
    """
    # type() and not isinstance(): JSON true is an int to Python.
    if not isinstance(values, list) or not _ONLY_INT.issuperset(map(type, values)):
        raise ValueError(f"expected a list of ints >= 0, found {values!r}")
    if values and (min(values) < 0 or max(values) >= _MAX_EXTENT):
        raise ValueError(f"expected a list of ints >= 0, found {values!r}")
    if len(values) > MAX_AXES:
        raise ValueError(f"expected at most {MAX_AXES} axes, found {len(values)}")
    return values


def write_index(
    index: Index, folder: Path, durability: local.Durability = local.Durability.FSYNC
) -> None:
    """Write the index file of the checkpoint in ``folder``, atomically."""
    path = folder / INDEX_NAME
    path.parent.mkdir(exist_ok=True)
    local.write_atomic(path, index.to_json(), durability)


def read_index(folder: Path) -> Index | None:
    """The index file of the checkpoint in ``folder``, or None if it has none."""
    path = folder / INDEX_NAME
    if not local.is_there(path):
        return None
    return Index.from_json(local.read_bytes(path, _MAX_INDEX_BYTES), str(path))
