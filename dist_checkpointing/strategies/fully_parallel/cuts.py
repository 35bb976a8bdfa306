"""Chunks of which several ranks want different cuts: one rank reads a chunk and sends the cuts.

Ranks that load columns of what was saved in rows want a strip of every chunk each. Where files are
read and not mapped, each of them would read nearly all that is stored. In place of that each chunk
is read once, a block of rows at a time, and each rank gets its strip of the block.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import Box, split_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.mapping.nesting import Path, Position
from dist_checkpointing.planning import DefaultLoadPlanner, LoadPlan
from dist_checkpointing.planning.balance import share_out
from dist_checkpointing.planning.read_table import ReadTable
from dist_checkpointing.planning.shard_table import Bools
from dist_checkpointing.storage.calls import result_of, set_up_reader
from dist_checkpointing.storage.protocol import StorageReader
from dist_checkpointing.strategies.fully_parallel.sharing import aligned, identities_of, numbered

_MOST_READ = 1.1
"""Chunks are read together if no more than that is read of each byte that is wanted."""

_HEAD = struct.Struct("<QQQ?")


@dataclass(frozen=True, slots=True)
class WantedSlice:
    """A part of a block, in the array of the chunk, that a row of a rank wants."""

    rank: int
    row: int
    box: Box


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a chunk, in its array, that one rank reads.

    The row is one of the reader. The cuts are what ranks want; on other ranks, what this one wants.
    """

    row: int
    box: Box
    itemsize: int
    cuts: tuple[WantedSlice, ...]

    def num_bytes(self, cut: WantedSlice) -> int:
        """Bytes that a cut takes in a message."""
        return aligned(cut.box.num_elements * self.itemsize)

    def parts(self, max_bytes: int) -> Iterator[Block]:
        """The block in blocks of rows of at most so many bytes."""
        for box in split_rows(self.box, max(1, max_bytes // self.itemsize)):
            common = ((cut, box.intersect(cut.box)) for cut in self.cuts)
            cuts = tuple(replace(cut, box=both) for cut, both in common if both is not None)
            yield replace(self, box=box, cuts=cuts)


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """How the ranks of a group read chunks of which they want different cuts.

    ``own`` are the rows of this rank that are read so. A part of an encoded chunk costs as much as
    the chunk, which then is not cuttable.
    """

    own: Bools
    chunks: Sequence[Sequence[Block]]
    max_bytes: int
    is_cuttable: bool

    def rounds(self) -> Iterator[Sequence[Sequence[Block]]]:
        """For each round and rank, the blocks that the rank reads."""
        return itertools.zip_longest(*map(self._rounds_of, self.chunks), fillvalue=())

    def _rounds_of(self, chunks: Sequence[Block]) -> Iterator[list[Block]]:
        waiting: list[Block] = []
        size = 0
        for chunk in chunks:
            for block in chunk.parts(self.max_bytes) if self.is_cuttable else [chunk]:
                num_bytes = block.box.num_elements * block.itemsize
                if waiting and size + num_bytes > self.max_bytes:
                    yield waiting
                    waiting, size = [], 0
                waiting.append(block)
                size += num_bytes
        if waiting:
            yield waiting


def pack_cuts(table: ReadTable, index: Index, buffer_bytes: int, min_shared_bytes: int) -> bytes:
    """What one rank wants, without objects, as bytes for ``share_cuts``."""
    width = table.lengths.shape[1]
    rows = np.empty(len(table), dtype=_row(width))
    digests = b"".join(map(xxhash.xxh3_128_digest, identities_of(table)))
    rows["high"], rows["low"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T
    itemsizes = np.array([index[key].dtype.itemsize for key in table.names], dtype=np.int64)
    rows["itemsize"] = itemsizes[table.keys]
    rows["offsets"], rows["lengths"] = table.storage_boxes, table.lengths
    rows["shapes"] = table.storage_shapes
    return _HEAD.pack(width, buffer_bytes, min_shared_bytes, index.codec is None) + rows.tobytes()


def _row(width: int) -> np.dtype[Any]:
    wide = [(name, "<i8", (width,)) for name in ("offsets", "lengths", "shapes")]
    return np.dtype([("high", "<u8"), ("low", "<u8"), ("itemsize", "<i8"), *wide])


def share_cuts(packed: Sequence[bytes], rank: int) -> Cuts | None:
    """How to read the chunks of which ranks want different cuts; None if there are too few.

    A chunk is read together if the cuts make up nearly all of what must be read for them, and one
    of them is not one run of bytes. Chunks with fewer bytes than ``min_shared_bytes`` in all are
    left to the ranks.
    """
    heads = [_HEAD.unpack_from(data) for data in packed]
    width = max(head[0] for head in heads)
    tables = [
        _padded(np.frombuffer(data, _row(head[0]), offset=_HEAD.size), width)
        for data, head in zip(packed, heads, strict=True)
    ]
    counts = [len(table) for table in tables]
    rows = np.concatenate(tables)
    ranks = np.repeat(np.arange(len(tables)), counts)
    own_rows = np.concatenate([np.arange(count) for count in counts])
    units, firsts = numbered(rows["high"], rows["low"])
    order = np.argsort(units, kind="stable")
    members = np.split(order, np.searchsorted(units[order], np.arange(1, len(firsts))))
    is_strided = _is_strided(rows)
    chosen = {}
    for unit in members:
        hull = _hull(rows[unit]) if len(unit) > 1 and is_strided[unit].any() else None
        if hull is not None and len(np.unique(ranks[unit])) > 1:
            chosen[int(unit[0])] = unit, hull
    sizes = [
        hull.num_elements * int(rows["itemsize"][first]) for first, (_, hull) in chosen.items()
    ]
    if not chosen or sum(sizes) < max(head[2] for head in heads):
        return None
    holders = [np.unique(ranks[unit]) for unit, _ in chosen.values()]
    starts, loads = np.cumsum([0, *map(len, holders)]), np.zeros(len(packed), dtype=np.int64)
    parts = np.arange(len(sizes))
    holding = np.concatenate(holders)
    readers = holding[share_out(holding, starts, parts, np.array(sizes), loads)].tolist()
    chunks: list[list[Block]] = [[] for _ in packed]
    for (unit, hull), reader in zip(chosen.values(), readers, strict=True):
        wanted = [WantedSlice(int(ranks[m]), int(own_rows[m]), _box(rows[m])) for m in unit]
        row = next(cut.row for cut in wanted if cut.rank == reader)
        cuts = tuple(cut for cut in wanted if rank in (reader, cut.rank))
        chunks[reader].append(Block(row, hull, int(rows["itemsize"][unit[0]]), cuts))
    own = np.zeros(counts[rank], dtype=np.bool_)
    together = np.concatenate([unit for unit, _ in chosen.values()])
    own[own_rows[together[ranks[together] == rank]]] = True
    # Of what all ranks read in a round this rank may get all, and so may all ranks of its block.
    max_bytes = max(1, min(head[1] for head in heads) // (2 * len(packed)))
    return Cuts(own, chunks, max_bytes, is_cuttable=all(head[3] for head in heads))


def _padded(rows: Any, width: int) -> Any:
    padded = np.empty(len(rows), dtype=_row(width))
    for name in ("high", "low", "itemsize"):
        padded[name] = rows[name]
    for name, fill in (("offsets", 0), ("lengths", 1), ("shapes", 1)):
        padded[name] = fill
        padded[name][:, : rows[name].shape[1]] = rows[name]
    return padded


def _is_strided(rows: Any) -> Bools:
    """Which boxes are more than one run in the array of their chunk."""
    is_cut = rows["lengths"] != rows["shapes"]
    # Of the axes before the last one that is cut, none may have an extent.
    behind = np.cumsum(is_cut[:, ::-1], axis=1)[:, ::-1] - is_cut
    result: Bools = ((behind > 0) & (rows["lengths"] > 1)).any(axis=1)
    return result


def _box(row: Any) -> Box:
    return Box(tuple(row["offsets"].tolist()), tuple(row["lengths"].tolist()))


def _hull(rows: Any) -> Box | None:
    """The box round some boxes; None if they are one box, or leave too much of it out."""
    boxes = {_box(row) for row in rows}
    offset = rows["offsets"].min(axis=0)
    shape = (rows["offsets"] + rows["lengths"]).max(axis=0) - offset
    hull = Box(tuple(offset.tolist()), tuple(shape.tolist()))
    wanted = sum(box.num_elements for box in boxes)
    return None if len(boxes) < 2 or hull.num_elements > _MOST_READ * wanted else hull


def pass_cuts(
    cuts: Cuts,
    table: ReadTable,
    acquire: Callable[[int], torch.Tensor],
    index: Index,
    reader: StorageReader,
    comm: Comm,
) -> None:
    """Read the chunks block by block, and fill all cuts. Collective."""

    def fill(cut: WantedSlice, values: torch.Tensor) -> None:
        array = acquire(cut.row).detach()
        box = Box(cut.box.offset[: array.ndim], cut.box.shape[: array.ndim])
        own = table.storage_boxes[cut.row, : array.ndim].tolist()
        destination = array[box.relative_to(tuple(own)).slices()]
        destination.copy_(values.view(destination.shape) if values.ndim == 1 else values)
        report(destination.nbytes)

    report, reader.report = reader.report, lambda _: None
    was_kept, reader.is_kept = reader.is_kept, True
    failed: Exception | None = None
    for blocks in cuts.rounds():
        sent, received = [0] * comm.world_size, [0] * comm.world_size
        arriving: list[tuple[Block, WantedSlice]] = []
        for source, of_source in enumerate(blocks):
            for block, cut in ((b, cut) for b in of_source for cut in b.cuts):
                if source != comm.rank:
                    received[source] += block.num_bytes(cut)
                    arriving.append((block, cut))
                elif cut.rank != comm.rank:
                    sent[cut.rank] += block.num_bytes(cut)
        message = torch.empty(sum(sent), dtype=torch.uint8, device=comm.tensor_device)
        # A rank with an error goes on to the end, so that no other rank waits for it.
        try:
            own = blocks[comm.rank]
            if own and failed is None:
                arrays = read_blocks(own, table, index, reader, comm)
                _pack(zip(own, arrays, strict=True), comm.rank, message, sent, fill)
        except Exception as error:  # noqa: BLE001 - raised on all ranks at the end
            failed = error
        arrived = comm.all_to_all_tensor(message, sent, received)
        try:
            for block, cut in arriving:
                dtype = index[table.key(cut.row)].dtype.torch
                fill(cut, arrived[: cut.box.num_elements * block.itemsize].view(dtype))
                arrived = arrived[block.num_bytes(cut) :]
        except Exception as error:  # noqa: BLE001 - as above
            failed = failed or error
    reader.report, reader.is_kept = report, was_kept
    comm.agree("passing on what was read", failed)


def _pack(
    read: Iterable[tuple[Block, torch.Tensor]],
    rank: int,
    message: torch.Tensor,
    sent: Sequence[int],
    fill: Callable[[WantedSlice, torch.Tensor], None],
) -> None:
    """Put the cuts of other ranks into a message, and fill those of this rank."""
    starts = [0, *itertools.accumulate(sent)]
    for block, array in read:
        for cut in block.cuts:
            values = array[cut.box.relative_to(block.box.offset).slices()[: array.ndim]]
            if cut.rank == rank:
                fill(cut, values)
                continue
            room = message[starts[cut.rank] :][: values.nbytes]
            room.view(values.dtype).view(values.shape).copy_(values)
            starts[cut.rank] += block.num_bytes(cut)


def read_blocks(
    blocks: Sequence[Block], table: ReadTable, index: Index, reader: StorageReader, comm: Comm
) -> list[torch.Tensor]:
    """The values of some blocks, in new memory."""
    rows = table.take(np.array([block.row for block in blocks], dtype=np.int64))
    width = rows.lengths.shape[1]
    lengths = np.array([block.box.shape[:width] for block in blocks], dtype=np.int64)
    offsets = np.array([block.box.offset[:width] for block in blocks], dtype=np.int64)
    rows = replace(
        rows,
        sources=np.arange(len(blocks), dtype=np.int32),
        dest_starts=np.zeros_like(rows.dest_starts),
        dest_shapes=lengths,
        dest_boxes=np.zeros_like(offsets),
        storage_boxes=offsets,
        lengths=lengths,
        given=None,
    )
    leaves: dict[Path, ShardedTensor] = {}
    for row, (shape, ndim) in enumerate(zip(lengths.tolist(), rows.window_ndim, strict=True)):
        key = rows.key(row)
        values = torch.empty(shape[:ndim], dtype=index[key].dtype.torch)
        leaves[(Position(row),)] = ShardedTensor.from_rank_offsets(key, values)
    planner = DefaultLoadPlanner()
    planner.configure_planner(leaves, index, is_coordinator=comm.rank == 0, rank=comm.rank)
    set_up_reader(reader, index, rank=comm.rank, world_size=comm.world_size)
    result_of(reader.read_data(reader.prepare_local_plan(LoadPlan(rows)), planner))
    return [leaf.data for leaf in leaves.values() if leaf.data is not None]
