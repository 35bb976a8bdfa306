"""Compares what a load has put into memory with the checksums of the save, without another read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.checksums import (
    ChecksumColumns,
    StoredPart,
    checksum_of,
    checksums_at,
)
from dist_checkpointing.format.geometry import Box, Window, padded, padded_rows, split_rows
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedTensor, tensor_memory
from dist_checkpointing.planning.load_plan import contiguous_ranges
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.planning.shard_table import Bools, Int64s
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.raw_chunks import SMALL_BYTES
from dist_checkpointing.threads import in_threads, paused_collector

_BLOCK_ROWS: Final = 1024
_MOST_ELEMENTS: Final = 2.0**40
"""Of a tensor; more may not fit into a column."""


@dataclass(frozen=True, slots=True, eq=False)
class FilledRows:
    """Stored parts that a load puts whole and as they are into runs of CPU memory, one a row."""

    table: ChecksumColumns
    addresses: Int64s
    num_bytes: Int64s

    def differing(self, report: Callable[[int], None]) -> list[tuple[StoredPart, int]]:
        """The parts whose memory does not have the checksum of the save, with the one it has."""
        differ: list[tuple[StoredPart, int]] = []
        for start in range(0, len(self.addresses), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            num_bytes = self.num_bytes[block]
            found = checksums_at(self.addresses[block], num_bytes)
            is_other = found != self.table.digests[block]
            if is_other.any():
                parts = self.table.parts(start + np.flatnonzero(is_other))
                differ += zip(parts, found[is_other].tolist(), strict=True)
            report(int(num_bytes.sum()))
        return differ


def filled_rows(
    tables: Sequence[ChecksumColumns], wanted: WantedLeaves, index: Index
) -> tuple[list[FilledRows], Bools]:
    """The small stored parts that lie in runs of the memory of leaves.

    Returns:
        Such parts; and for which tensors they are everything. The checksums cover such a tensor
        once, and its leaf gets nothing of a part that is not among the rows. The parts of the other
        tensors must be looked at one by one.
    """
    own, shards = wanted.tensors, wanted.shards
    itemsizes = index.itemsizes_of(own.keys)
    shapes, _ = index.shapes_of(own.keys)
    ndim = np.fromiter(map(len, shapes), dtype=np.int32, count=len(shapes))
    stored = padded_rows(shapes, 1)
    is_whole = _lie_as_stored(wanted, index, itemsizes) & (ndim == shards.ndim)
    is_whole &= stored.astype(np.float64).prod(axis=1) < _MOST_ELEMENTS
    leaf_of = {key: leaf for leaf, key in enumerate(own.keys)}
    if len(leaf_of) < len(own):
        times = Counter(own.keys)
        is_whole &= [times[key] == 1 for key in own.keys]
    counted = np.zeros(len(own), dtype=np.int64)
    found = []
    for table in tables:
        names = np.fromiter(map(leaf_of.get, table.names, repeat(-1)), dtype=np.int64)
        leaves = np.where(table.is_object == 0, names[table.keys], -1)
        rows = np.flatnonzero(leaves >= 0)
        leaves = leaves[rows]
        placed = _placed(table, rows, wanted, leaves)
        is_whole[leaves[placed.is_other]] = False
        np.add.at(counted, leaves, placed.counts)
        found.append((table, rows, leaves, placed))
    is_whole &= counted == stored.prod(axis=1)
    direct = []
    for table, rows, leaves, placed in found:
        kept = placed.is_direct & is_whole[leaves]
        items = itemsizes[leaves[kept]]
        addresses = own.addresses[leaves[kept]] + placed.starts[kept] * items
        # With the keys of the leaves, because those of the table take as much memory again.
        own_rows = table.renamed(rows[kept], own.keys, leaves[kept])
        direct.append(FilledRows(own_rows, addresses, placed.counts[kept] * items))
    return direct, is_whole


def _lie_as_stored(wanted: WantedLeaves, index: Index, itemsizes: Int64s) -> Bools:
    """Which tensors lie in CPU memory in C order, and in the stored dtype."""
    own, flat = wanted.tensors, wanted.shards.flat
    numbers, types = index.dtypes_of(own.keys)
    known = {dtype.torch: number for number, dtype in enumerate(types) if dtype is not None}
    is_right: Bools = numbers == [known.get(dtype, -1) for dtype in own.data_dtypes]
    counts = wanted.shards.shapes.prod(axis=1)
    counts = np.where(flat[:, 0] >= 0, flat[:, 1] - flat[:, 0], counts)
    is_right &= (own.addresses >= 0) & (own.num_bytes == counts * itemsizes)
    return is_right


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Where stored parts lie in the memory of leaves.

    A part is direct if it is one run there; it is another one if it is not, though the leaf gets
    something of it, or if it is not small.
    """

    starts: Int64s
    counts: Int64s
    is_direct: Bools
    is_other: Bools


def _placed(table: ChecksumColumns, rows: Int64s, wanted: WantedLeaves, leaves: Int64s) -> _Placed:
    """Where some rows lie in the memory of their leaves."""
    shards, ndim = wanted.shards, table.ndim[rows]
    width = shards.offsets.shape[1]
    is_axis = np.arange(table.offsets.shape[1]) < ndim[:, None]
    offsets = padded(np.where(is_axis, table.offsets[rows], 0), width, 0)[:, :width]
    extents = padded(np.where(is_axis, table.shapes[rows], 1), width, 1)[:, :width]
    flat, own_flat = table.flat[rows], shards.flat[leaves]
    begin, shapes = shards.offsets[leaves], shards.shapes[leaves]
    is_flat = flat[:, 0] >= 0
    is_small = (
        (ndim == shards.ndim[leaves]) & (extents > 0).all(axis=1) & (offsets >= 0).all(axis=1)
    )
    is_small &= extents.astype(np.float64).prod(axis=1) <= SMALL_BYTES
    extents = np.where(is_small[:, None], extents, 1)
    counts = np.where(is_flat, flat[:, 1] - flat[:, 0], extents.prod(axis=1))
    is_small &= (counts > 0) & (counts <= SMALL_BYTES)
    within = offsets - begin
    is_inside = ((within >= 0) & (within + extents <= shapes)).all(axis=1)
    meets = ((within < shapes) & (within + extents > 0)).all(axis=1)
    zeros = np.zeros(len(rows), dtype=np.int64)
    starts, is_run = contiguous_ranges(zeros, shapes, within, extents)
    is_same = (within == 0).all(axis=1) & (extents == shapes).all(axis=1)
    is_same &= (flat == own_flat).all(axis=1)
    is_plain = ~is_flat & (own_flat[:, 0] < 0)
    is_direct = is_small & (is_flat & is_same | is_plain & is_inside & is_run)
    starts[is_flat] = 0
    is_other = ~is_small | meets & ~is_direct
    return _Placed(starts, np.where(is_small, counts, 0), is_direct, is_other)


_BLOCK_BYTES: Final = 2**22
"""At most so much of what does not lie in one run of CPU memory is copied at a time."""


FilledPart = tuple[StoredPart, torch.Tensor]
"""A part, with its checksum, that a load puts whole and as it is into the memory of one leaf."""


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """What a load puts into memory as it is, to be compared afterwards; small parts as rows."""

    parts: Sequence[FilledPart] = ()
    rows: Sequence[FilledRows] = ()


def split_filled(
    parts: Mapping[str, Sequence[StoredPart]], leaves: Sequence[ShardedTensor], index: Index
) -> tuple[list[FilledPart], list[StoredPart]]:
    """The stored parts that leaves get whole, and the other ones that leaves get something of."""
    wanted: dict[str, list[ShardedTensor]] = {}
    for leaf in leaves:
        wanted.setdefault(leaf.key, []).append(leaf)
    filled, others = [], []
    for key, known in parts.items():
        dtype = index.dtype_of(key).torch
        for part in known:
            values = None
            if part.digest is not None:
                found = (values_of(leaf, part, dtype) for leaf in wanted[key])
                values = next((memory for memory in found if memory is not None), None)
            if values is not None:
                filled.append((part, values))
            elif any(part.box.intersect(leaf.box) is not None for leaf in wanted[key]):
                others.append(part)
    return filled, others


def values_of(leaf: ShardedTensor, part: StoredPart, dtype: torch.dtype) -> torch.Tensor | None:
    """The memory of a leaf that holds a stored part; None if it does not hold all of it as is."""
    data, box, own, stored = leaf.data, leaf.box, leaf.flat_range, part.flat_range
    is_whole = own == stored and part.box == box and not leaf.prepend_axis_num
    if data is None or data.dtype is not dtype or not (is_whole or box.contains(part.box)):
        return None
    if is_whole:
        return data
    if own is None and stored is None:
        whole = data[(None,) * leaf.prepend_axis_num] if leaf.prepend_axis_num else data
        return whole[part.box.relative_to(box.offset).slices()]
    run = Window(0, box.shape, part.box.relative_to(box.offset)).contiguous_range()
    if run is None:
        return None
    start, stop = run if stored is None else (run[0] + stored[0], run[0] + stored[1])
    if own is not None:
        return data[start - own[0] : stop - own[0]] if own[0] <= start <= stop <= own[1] else None
    return data.view(-1)[start:stop] if data.is_contiguous() else None


def verify_filled(filled: Filled, options: StorageOptions, meter: Meter) -> None:
    """Compare the memory of filled parts with their checksums. Not collective.

    Raises:
        CheckpointingException: with key and box of every part that differs. The stored data may
            be good nevertheless: another read tells.
    """
    of_parts = sum(values.nbytes for _, values in filled.parts)
    meter.expect(of_parts + sum(int(own.num_bytes.sum()) for own in filled.rows))
    small = [own for own in filled.parts if own[1].nbytes <= SMALL_BYTES]
    large = [own for own in filled.parts if own[1].nbytes > SMALL_BYTES]

    def compare(own: FilledPart) -> tuple[StoredPart, int]:
        part, values = own
        found = checksum_of(_blocks(values))
        meter.add(values.nbytes)
        return part, found

    # Many small parts are work for the interpreter: threads would only take turns.
    with paused_collector():
        digests = [found for own in filled.rows for found in own.differing(meter.add)]
        digests += [compare(own) for own in small]
    digests += in_threads(compare, large, options.threads)
    findings = [
        Finding(
            "memory does not hold what was saved, though another read of it does",
            part.key,
            expected=f"{part.digest or 0:016x}",
            found=f"{found:016x} in {part.box}",
            remedy="Give each leaf memory of its own. If it has, memory or the file system of this"
            " machine changes what is read.",
        )
        for part, found in digests
        if found != part.digest
    ]
    if findings:
        raise CheckpointingException("what was loaded is not what is stored", findings)


def _blocks(values: torch.Tensor) -> Iterator[npt.NDArray[Any]]:
    """The values of a tensor on any device, as contiguous arrays in C order."""
    values = values.detach()
    if tensor_memory.is_plain_memory(values):
        yield tensor_memory.as_numpy(values)
        return
    for block in split_rows(Box.whole(tuple(values.shape)), _BLOCK_BYTES // values.itemsize):
        yield np.ascontiguousarray(tensor_memory.as_numpy(values[block.slices()].cpu()))
