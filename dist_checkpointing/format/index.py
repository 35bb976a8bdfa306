"""The index: keys, shapes, dtypes and chunks that a checkpoint holds, ``.dckpt/index.json``.

One small JSON file of columns, whatever the number of ranks. It is read by rank 0, and only the
rows that a load asks for become objects. It may ask for any amount of memory or work: what it says
of a large tensor is believed when the files have the bytes, and the chunks, that it speaks of.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, wraps
from typing import Any, Final, TypeVar

import numpy as np
import xxhash

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import Durability, json_text
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import (
    MAX_AXES,
    Bools,
    Box,
    ChunkGrid,
    Int64s,
    Ints,
    Part,
    PieceColumns,
    Pieces,
    are_extents,
    ints_from_json,
    padded_rows,
    rows_from_lists,
)
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.threads import paused_collector


def pieces_text(pieces: Mapping[str, Pieces]) -> str:
    """The pieces of all tensors as JSON. Columns of tensors that are cut alike become text once."""
    known: dict[tuple[bytes, tuple[int, ...]], str] = {}

    def text(rows: Int64s) -> str:
        content = rows.tobytes(), rows.shape
        if content not in known:
            if len(rows) > 1 and (rows == rows[0]).all():  # such as flattened pieces of one box
                known[content] = f"[{','.join([json_text(rows[0].tolist())] * len(rows))}]"
            else:
                known[content] = json_text(rows.tolist())
        return known[content]

    tables = (
        f'{json_text(key)}:{{"offsets":{text(table.offsets)},'
        f'"shapes":{text(table.shapes)},"flat":{text(table.flat)}}}'
        for key, table in pieces.items()
    )
    return f"{{{','.join(tables)}}}"


def without_pieces(data: bytes) -> tuple[bytes, list[Pieces]]:
    """The text of an index with a number for each table of pieces, and the tables by number.

    They are most of a large index, and become arrays without a Python object for each row. What is
    the same for many tensors does so once.
    """
    # A quotation mark in a string has a backslash before it, so that no key contains this.
    first, *texts = data.split(b'{"offsets":')
    if not texts:
        return data, []
    rows = cache(_parsed_rows)

    @cache
    def table(columns: bytes) -> Pieces:
        offsets, rest = columns.split(b',"shapes":')
        return Pieces.checked(rows(offsets), *map(rows, rest.split(b',"flat":')))

    parts, tables = [first], []
    for number, text in enumerate(texts):
        columns, _, rest = text.partition(b"}")
        tables.append(table(columns))
        parts += [b"%d" % number, rest]
    return b"".join(parts), tables


def _parsed_rows(text: bytes) -> Int64s:
    """Rows of ints of a JSON text: ``[rows, ints]``."""
    inner = text[2:-2]
    if inner.strip(b"[],") and b"[[%b]]" % inner == text:
        num_rows = inner.count(b"],[") + 1
        first = inner.partition(b"],[")[0]
        if num_rows > 1 and inner == b"],[".join([first] * num_rows):
            return _parsed_rows(b"[[%b]]" % first).repeat(num_rows, axis=0)
        numbers = local_folder.parse_json(b"[%b]" % inner.replace(b"],[", b","))
        width = len(numbers) // num_rows
        # All rows have so many numbers, and nothing is in them but digits.
        bare = b"],[".join([b"," * (width - 1)] * num_rows)
        if width <= MAX_AXES and inner.translate(None, b"-0123456789") == bare:
            return np.array(numbers, dtype=np.int64).reshape(num_rows, width)
    return rows_from_lists(local_folder.parse_json(text))


def strings(values: Any) -> list[str]:
    if not isinstance(values, list) or not {str}.issuperset(map(type, values)):
        raise ValueError("expected a list of strings")
    "".join(values).encode()  # half of a surrogate pair is in no key and in no file name
    return values


def shapes(keys: Sequence[str], column: Any, *, optional: bool = False) -> list[Any]:
    """A column of shapes, one a key; None stays if it is optional."""
    if not isinstance(column, list) or len(column) != len(keys):
        raise ValueError("columns of different length")
    given = [shape for shape in column if shape is not None] if optional else column
    are_lists = {list}.issuperset(map(type, given))
    if (
        not are_lists
        or not are_extents([*itertools.chain.from_iterable(given)])
        or max(map(len, given), default=0) > MAX_AXES
    ):
        for key, shape in zip(keys, column, strict=True):
            try:
                ints_from_json([] if optional and shape is None else shape)
            except ValueError as error:
                raise ValueError(f"{key!r}: {error}") from None
    rows = [None if shape is None else tuple(shape) for shape in column]
    # Many tensors have few shapes: equal ones are one object.
    known: dict[Any, Any] = {}
    return list(map(known.setdefault, rows, rows))


_is_fingerprint = re.compile("[0-9a-f]{32}").fullmatch


def fingerprints_of_json(keys: Sequence[str], content: Any) -> dict[str, str]:
    """The fingerprints by key; older writers, and saves without them, have none."""
    if content is None:
        return {}
    if not isinstance(content, list) or len(content) != len(keys):
        raise ValueError("fingerprints are not a column of their own length")
    known = {key: text for key, text in zip(keys, content, strict=True) if text is not None}
    if not all(isinstance(text, str) and _is_fingerprint(text) for text in known.values()):
        raise ValueError("a fingerprint is not 32 hex digits")
    return known


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
    dtype: dtypes.DType
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
        return math.prod(self.global_shape) * self.dtype.itemsize

    @property
    def num_parts(self) -> int:
        """Number of chunks or pieces."""
        return math.prod(self.grid.counts) if self.pieces is None else len(self.pieces)

    def parts(self) -> Iterator[Part]:
        """Box and flat range of each chunk, in C order, or piece."""
        if self.pieces is not None:
            return iter(self.pieces)
        places = itertools.product(*map(range, self.grid.counts))
        return ((self.grid.box(place), None) for place in places)

    @classmethod
    def undivided(cls, key: str, dtype: dtypes.DType, shape: Sequence[int]) -> StoredTensor:
        """A tensor that is stored as one chunk."""
        return cls(key, dtype, tuple(shape), tuple(max(1, extent) for extent in shape))


def _for_last_keys(
    find: Callable[[Index, Iterable[str]], T],
) -> Callable[[Index, Iterable[str]], T]:
    """Remember what was found for the last tuple of keys, for which the steps of a load all ask."""

    @wraps(find)
    def found(index: Index, keys: Iterable[str]) -> T:
        if type(keys) is not tuple:
            return find(index, keys)
        last, results = index.__dict__.get("_last", (None, {}))
        if last is not keys:
            results = {}
            index.__dict__["_last"] = (keys, results)
        if find not in results:
            results[find] = find(index, keys)
        known: T = results[find]
        return known

    return found


@dataclass(frozen=True, eq=False)
class Index(Mapping[str, StoredTensor]):
    """Key -> stored tensor, plus the grids of sharded objects that the backend holds itself.

    Columns of equal length, one entry a tensor; a tensor becomes an object when it is asked for.
    Its chunk shape is None if it is stored as ``pieces``. The codec is that of all chunks.
    Fingerprints, see ``storage.fingerprints``, may have been kept for all tensors, some or none.
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
                dtypes.from_name(self.dtype_column[row]),
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

    @_for_last_keys
    def rows_of(self, keys: Iterable[str]) -> Int64s:
        """Position of each key in the columns; -1 for a key that is not there."""
        return np.fromiter(map(self._row.get, keys, itertools.repeat(-1)), dtype=np.int64)

    @cached_property
    def has_grid(self) -> Bools:
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

    @_for_last_keys
    def dtypes_of(self, keys: Iterable[str]) -> tuple[Int64s, list[dtypes.DType | None]]:
        """Dtype of each key as a position in the list; that of None for a key that is not there."""
        column = self.dtype_column
        names = [column[row] if row >= 0 else None for row in self.rows_of(keys).tolist()]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        numbers = np.fromiter(map(number.__getitem__, names), dtype=np.int64, count=len(names))
        return numbers, [None if name is None else dtypes.from_name(name) for name in number]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        sizes = {name: dtypes.from_name(name).itemsize for name in {*self.dtype_column}}
        columns = zip(self.global_shape_column, self.dtype_column, strict=True)
        return sum(math.prod(shape) * sizes[dtype] for shape, dtype in columns)

    def itemsizes_of(self, keys: Iterable[str]) -> Int64s:
        """Bytes of an element of each tensor; 0 for a key that is not there."""
        numbers, types = self.dtypes_of(keys)
        sizes = [0 if dtype is None else dtype.itemsize for dtype in types]
        return np.array(sizes, dtype=np.int64)[numbers]

    @_for_last_keys
    def shapes_of(
        self, keys: Iterable[str]
    ) -> tuple[list[Sequence[int]], list[Sequence[int] | None]]:
        """Global shapes and chunk shapes (None where there are pieces) of tensors that it holds."""
        found = self.rows_of(keys)
        assert not (found < 0).any(), "a tensor that it does not hold"
        rows = found.tolist()
        shapes, chunks = self.global_shape_column, self.chunk_shape_column
        return [shapes[row] for row in rows], [chunks[row] for row in rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_column)

    def __len__(self) -> int:
        return len(self.keys_column)

    def without(self, dropped: Iterable[str]) -> Index:
        gone = set(dropped)
        kept = Index.of((self[key] for key in self if key not in gone), self.objects)
        fingerprints = {key: text for key, text in self.fingerprints.items() if key not in gone}
        return replace(kept, codec=self.codec, fingerprints=fingerprints)

    def to_json(self) -> bytes:
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
        remedy = "Use another checkpoint, or restore this file."
        with local_folder.parsing(message, path, remedy=remedy):
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
            keys, codec = strings(content["keys"]), content["codec"]
            if codec is not None and not isinstance(codec, str):
                raise ValueError(f"expected a string, found {codec!r}")
            objects = strings([*content["objects"]])
            grids = shapes(objects, [*content["objects"].values()])
            pieces = content["pieces"]
            if not isinstance(pieces, dict) or [*pieces.values()] != [*range(len(tables))]:
                raise ValueError("expected pieces by key")
            index = cls(
                keys,
                strings(content["dtypes"]),
                shapes(keys, content["global_shapes"]),
                shapes(keys, content["chunk_shapes"], optional=True),
                PieceColumns.of(dict(zip(pieces, tables, strict=True))) if tables else {},
                dict(zip(objects, grids, strict=True)),
                codec,
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
            dtypes.from_name(name)
        shapes, chunks = columns[1:]
        if (
            not self.pieces
            and None not in chunks
            and list(map(len, shapes)) == list(map(len, chunks))  # type: ignore[arg-type]
            and 0 not in set(itertools.chain.from_iterable(chunks))  # type: ignore[arg-type]
        ):
            return  # all have a chunk grid that fits
        for key, shape, chunk in zip(self.keys_column, shapes, chunks, strict=True):
            pieces = self.pieces.get(key)
            if (chunk is None) == (pieces is None):
                raise ValueError(f"{key!r} needs either a chunk grid or pieces")
            if pieces is not None:
                if pieces.offsets.shape[1:] != (len(shape),):
                    raise ValueError(f"{key!r} has pieces of another number of axes")
                if not (pieces.offsets + pieces.shapes <= np.array(shape, dtype=np.int64)).all():
                    raise ValueError(f"{key!r} has pieces outside of it")
            elif chunk is not None and (len(chunk) != len(shape) or 0 in chunk):
                raise ValueError(f"{key!r} has chunk shape {chunk} for shape {shape}")


def write_index(
    index: Index, folder: Location, durability: Durability = Durability.FSYNC
) -> SealedFile:
    """Write a new index file; a power cut takes it until ``.dckpt`` is synced."""
    return SealedFile.put(folder, INDEX_NAME, index.to_json(), durability)


def read_index(folder: Location) -> Index | None:
    """The index file of the checkpoint in ``folder``, or None if it has none."""
    path = folder / INDEX_NAME
    try:
        return Index.from_json(location.read_bytes(path, _MAX_INDEX_BYTES), str(path))
    except (FileNotFoundError, NotADirectoryError):
        if location.is_there(path):
            raise
        return None


LARGE_BYTES: Final = 1 << 28
MANY_PARTS: Final = 1 << 16
"""A tensor with more bytes than ``LARGE_BYTES`` or more chunks than this is looked at, and so is a
sharded object with more cells."""
MOST_COMPRESSION: Final = 1 << 16
"""How many times larger than its file a compressed chunk may be; zeros reach half of that."""


@dataclass(frozen=True, slots=True)
class StatedSize:
    """What an index says of one tensor or object: its bytes, and its chunks, pieces or cells."""

    key: str
    num_bytes: int
    num_parts: int


def stated_size(tensor: StoredTensor) -> StatedSize:
    return StatedSize(tensor.key, tensor.num_bytes, tensor.num_parts)


def large_tensors(index: Index, keys: Iterable[str]) -> list[StatedSize]:
    """The sizes of those of the tensors that are large: it is worth a look at the files."""
    sizes = (stated_size(index[key]) for key in keys)
    return [s for s in sizes if s.num_bytes > LARGE_BYTES or s.num_parts > MANY_PARTS]


def large_objects(grids: Mapping[str, Ints]) -> list[StatedSize]:
    """The sizes of those of the sharded objects, by key, that have many cells."""
    sizes = (StatedSize(key, 0, math.prod(shape)) for key, shape in grids.items())
    return [size for size in sizes if size.num_parts > MANY_PARTS]


def meets_many(tensor: StoredTensor, box: Box) -> bool:
    """Whether a box of a tensor may meet so many chunks of its grid that they are worth a look."""
    met = (n // c + 2 for n, c in zip(box.shape, tensor.grid.chunk_shape, strict=False))
    return math.prod(met) > MANY_PARTS


def require_backing(
    stated: Iterable[StatedSize], backing_of: Callable[[StatedSize], tuple[int, int, str]]
) -> None:
    """Refuse sizes that the files cannot hold.

    ``backing_of`` gives the bytes and parts that they can, and the file that states the size.
    """
    findings = [
        Finding(
            "it would not fit into the files that are there",
            size.key,
            expected=f"{size.num_bytes} bytes in {size.num_parts} parts",
            found=f"room for {num_bytes} bytes, {num_parts} parts",
            path=path,
            remedy="Use another checkpoint: parts are lost, or this file is damaged.",
        )
        for size in stated
        for num_bytes, num_parts, path in [backing_of(size)]
        if size.num_bytes > num_bytes or size.num_parts > num_parts
    ]
    CorruptCheckpointError.raise_if(findings, "the checkpoint is not as large as it says")


def size_of_files(folder: Location) -> tuple[int, int]:
    """``(bytes, files)`` of all regular files below a folder; links are not followed."""
    sizes = [size for size in location.files_below(folder).values() if size is not None]
    return sum(sizes), len(sizes)
