"""Who reads what, for whom, and how it travels: pure functions of what a group of ranks wants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import Box, Ints, split_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.planning.balance import share_out, tensor_replicas
from dist_checkpointing.planning.shard_table import ShardTable, concatenate

_MAX_UNIT_BYTES = 32 * 2**20
_MIN_UNIT_BYTES = 2**18
_UNITS_A_RANK = 32
"""Units of a thirty-second of a rank's share leave at most that much of a difference."""

_ALIGNMENT_BYTES = 16
"""A view as any dtype may begin at such a place."""

Cut = Callable[[str, Box, int], list[Box]]
"""Key and box of a part, and about the most elements that one rank should read at a time -> boxes
inside of it (counted from its offset) that may be read by different ranks."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one rank reads, for itself and for all others that want it.

    Attributes:
        dtype: in memory.
        shape: of the array that holds the whole part: its box, or its flattened range.
        box: which rows of the array this is.
        reader: the rank that reads it.
        wanted_by: the ranks that want it.
        sources: the leaves of this rank that want it.
    """

    dtype: dtypes.DType
    shape: Ints
    box: Box
    reader: int
    wanted_by: Ints
    sources: Ints

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the part."""
        return self.box.shape == self.shape

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Block:
    """A run of rows on its way.

    Attributes:
        unit: number of the unit.
        box: which rows of the part's array.
        start: first byte in the message.
        num_bytes: of it.
    """

    unit: int
    box: Box
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank hands to the others at a time."""

    source: int
    blocks: tuple[Block, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """How the ranks of a group share their reads.

    Attributes:
        units: the same on all ranks, but for ``sources``.
        messages: likewise; in the order in which they travel.
    """

    units: Sequence[Unit]
    messages: Sequence[Message]


def whole_part(key: str, box: Box, most_elements: int) -> list[Box]:
    """One rank reads all of a part."""
    del key, most_elements
    return [Box.whole(box.shape)]


def along_chunks(index: Index) -> Cut:
    """Ranks read different rows of a part, but no two of them of one chunk."""

    def cut(key: str, box: Box, most_elements: int) -> list[Box]:
        chunk = index.chunk_shape(key) if key in index else None
        whole = Box.whole(box.shape)
        if chunk is None or len(chunk) != len(box.shape) or box.num_elements <= most_elements:
            return [whole]
        axis = next(a for a, extent in enumerate(box.shape) if extent > 1)
        row_elements = box.num_elements // box.shape[axis]
        rows, begin, end = chunk[axis], box.offset[axis], box.offset[axis] + box.shape[axis]
        step = max(1, most_elements // row_elements // rows) * rows
        cuts = [begin, *range((begin // rows) * rows + step, end, step), end]
        return [
            Box(
                (*whole.offset[:axis], first - begin, *whole.offset[axis + 1 :]),
                (*whole.shape[:axis], last - first, *whole.shape[axis + 1 :]),
            )
            for first, last in itertools.pairwise(cuts)
        ]

    return cut


def share_reads(
    tables: Sequence[ShardTable], rank: int, cut: Cut, *, min_shared_bytes: int, message_bytes: int
) -> Sharing | None:
    """How ranks that want these shards share the reads; None if it is not worth it.

    Args:
        tables: what each rank wants.
        rank: this one.
        cut: how a part may be cut up.
        min_shared_bytes: with fewer bytes that several ranks want, each reads for itself.
        message_bytes: about the most that travels at a time.
    """
    catalog = concatenate(tables)
    replicas = tensor_replicas(catalog)
    firsts = catalog.take(replicas.firsts)
    is_shared = replicas.counts > 1
    if not is_shared.any() or firsts.num_bytes[is_shared].sum() < min_shared_bytes:
        return None
    mean = int(firsts.num_bytes.sum()) // len(tables)
    unit_bytes = min(max(mean // _UNITS_A_RANK, _MIN_UNIT_BYTES), _MAX_UNIT_BYTES)
    boxes: list[Box] = []
    parts: list[int] = []
    for part in range(len(replicas)):
        box, flat = firsts.box(part), firsts.flat_range(part)
        if flat is not None:
            cuts = [Box((0,), (flat[1] - flat[0],))]
        elif is_shared[part]:
            most = max(1, unit_bytes // dtypes.from_name(firsts.dtype(part)).itemsize)
            cuts = cut(firsts.key(part), box, most)
        else:
            cuts = [Box.whole(box.shape)]
        boxes += cuts
        parts += [part] * len(cuts)
    part_of = np.array(parts, dtype=np.int64)
    itemsizes = firsts.num_bytes // firsts.num_elements
    sizes = np.array([box.num_elements for box in boxes], dtype=np.int64) * itemsizes[part_of]
    ranks = catalog.ranks[replicas.rows]
    loads = np.zeros(len(tables), dtype=np.int64)
    readers = ranks[share_out(ranks, replicas.starts, part_of, sizes, loads)].tolist()
    own = _sources_of_parts(tables[rank])
    columns = zip(parts, boxes, readers, strict=True)
    units = []
    for part, box, reader in columns:
        flat = firsts.flat_range(part)
        begin, end = replicas.starts[part : part + 2].tolist()
        units.append(
            Unit(
                dtypes.from_name(firsts.dtype(part)),
                firsts.box(part).shape if flat is None else (flat[1] - flat[0],),
                box,
                reader,
                tuple(ranks[begin:end].tolist()),
                own.get(_identity(firsts, part), ()),
            )
        )
    return Sharing(units, list(_messages(units, message_bytes)))


def _identity(table: ShardTable, row: int) -> tuple[object, ...]:
    return table.key(row), table.dtype(row), table.box(row), table.flat_range(row)


def _sources_of_parts(table: ShardTable) -> dict[tuple[object, ...], Ints]:
    """Part -> the leaves of a rank that are it: a rank may ask for the same twice."""
    sources: dict[tuple[object, ...], Ints] = {}
    for row, source in enumerate(table.sources.tolist()):
        part = _identity(table, row)
        sources[part] = (*sources.get(part, ()), source)
    return sources


def _messages(units: Sequence[Unit], most_bytes: int) -> Iterator[Message]:
    """Everything that somebody else wants: small things together, large things in pieces."""
    waiting: dict[int, list[Block]] = {}
    for number, unit in enumerate(units):
        if len(unit.wanted_by) < 2:
            continue
        for piece in split_rows(unit.box, max(1, most_bytes // unit.dtype.itemsize)):
            num_bytes = piece.num_elements * unit.dtype.itemsize
            blocks = waiting.setdefault(unit.reader, [])
            start = _aligned(blocks[-1].start + blocks[-1].num_bytes) if blocks else 0
            if blocks and start + num_bytes > most_bytes:
                yield _message(unit.reader, blocks)
                blocks.clear()
                start = 0
            blocks.append(Block(number, piece, start, num_bytes))
    for reader, blocks in sorted(waiting.items()):
        yield _message(reader, blocks)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _message(source: int, blocks: Sequence[Block]) -> Message:
    return Message(source, tuple(blocks), blocks[-1].start + blocks[-1].num_bytes)
