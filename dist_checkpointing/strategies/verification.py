"""Whether stored parts, or memory that a load has filled, are what was saved."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import (
    CHECKSUMS_NAME,
    ChecksumColumns,
    ChecksumTable,
    StoredPart,
    checksum,
    checksum_files,
    checksum_of,
    checksum_of_bytes,
    checksums_at,
    concatenate_tables,
    read_table,
)
from dist_checkpointing.format.geometry import Box, Ints, Window, padded, padded_rows, split_rows
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.seal import Seal, check_config, check_files
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, tensor_memory
from dist_checkpointing.mapping.nested_dicts import DictKey
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.planning import MetadataIndex
from dist_checkpointing.planning.load_plan import contiguous_ranges
from dist_checkpointing.planning.planners import misfits
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.planning.shard_table import Bools, Int64s
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader, set_up_reader
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    handles_objects,
)
from dist_checkpointing.strategies.chunk_reads import SMALL_BYTES
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy
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


logger: logging.Logger = logging.getLogger(__name__)


_ALIGNMENT_BYTES = 64


def verify_wanted(
    wanted: WantedLeaves,
    objects: Sequence[ShardedObject],
    strategy: LoadShardedStrategy,
    common: LoadCommonStrategy,
    checkpoint_dir: Location,
    index: Index | None,
    seal: Seal | None,
    meter: Meter,
    reader: StorageReader | None,
) -> Filled:
    """Verify what a load reads, before it is read. Not collective.

    Stored parts that fill memory of the wanted tensors are only looked up: the load reads them, and
    ``verify_filled`` compares them then. All other ones are read here. Without memory, that is
    everything. Without a seal only tensors can be verified. A strategy that is not made of a reader
    has neither index nor reader.

    Returns:
        The parts that are left to be compared after the load has read them.

    Raises:
        UnsupportedFormatError: if no checksums were kept.
        CorruptCheckpointError: with key, part and place of everything that is damaged, or that the
            seal or the checksums do not speak of.
        StateMismatchError: if objects are wanted that are not stored, or in another grid.
        OSError: if the file system, and not the checkpoint, fails.
    """
    keys = dict.fromkeys(wanted.tensors.keys)
    planned = strategy if isinstance(strategy, PlannedLoadStrategy) else None
    findings: list[Finding] = []
    filled = Filled()
    has_objects = handles_objects(strategy)
    by_common = [] if has_objects else objects
    if seal is None or seal.is_open:
        logger.warning(
            "%s %s: the common state and sharded objects in files are not verified",
            checkpoint_dir,
            "has no seal" if seal is None else "has an open seal, as a removal was cut off",
        )
        table = concatenate_tables(read_table(path) for path in checksum_files(checkpoint_dir))
    else:
        names = [*common.file_names(by_common, checkpoint_dir)]
        # A file that was saved and is gone has been lost, and was not only asked for by mistake.
        files = (f"{leaf.unique_key}.pt" for leaf in by_common)
        names += [name for name in files if name in seal.files and name not in names]
        if reader is not None and (keys or (has_objects and objects)):
            names += reader.describing_names(keys)
        tables = seal.tables_with([*keys, *(leaf.key for leaf in objects)])
        findings += check_config(seal, checkpoint_dir)
        findings += check_files(seal, checkpoint_dir, [*names, *tables])
        if findings:
            raise CorruptCheckpointError("stored data is not what was saved", findings)
        table = concatenate_tables(read_table(checkpoint_dir / name) for name in tables)
    has_parts = any((own.is_object == 0).any() for own in table.columns)
    has_values = index is None or any(0 not in index[k].global_shape for k in keys if k in index)
    if keys and (planned is None or index is None or (has_values and not has_parts)):
        finding = Finding(
            "no checksums were kept when it was saved", path=str(checkpoint_dir / CHECKSUMS_NAME)
        )
        raise UnsupportedFormatError("the checkpoint cannot be verified", [finding])
    if planned is not None and index is not None and reader is not None:
        filled, others, uncovered = _looked_up(table, wanted, index)
        findings += uncovered
        findings += damage_of(others, planned, reader, index, meter)
        if seal is not None and has_objects and objects:
            misfitting = [finding for leaf in objects for finding in misfits(leaf, index)]
            if misfitting and not findings:
                message = "the checkpoint does not hold what is wanted"
                raise StateMismatchError(message, misfitting)
            set_up_reader(reader, index, rank=0, world_size=1)
            cells = [(leaf.key, tuple(leaf.global_offset)) for leaf in objects]
            findings += damage_of_objects(cells, table.objects, reader)
    if findings:
        raise CorruptCheckpointError("stored data is not what was saved", findings)
    return filled


def _looked_up(
    table: ChecksumTable, wanted: WantedLeaves, index: Index
) -> tuple[Filled, list[StoredPart], list[Finding]]:
    """The parts that fill memory, the others that are wanted, and what no checksum speaks of."""
    own = wanted.tensors
    rows: list[FilledRows] = []
    with paused_collector():
        is_apart = index.rows_of(own.keys) >= 0
        if is_apart.all():
            rows, is_whole = filled_rows(table.columns, wanted, index)
            is_apart = ~is_whole
        leaves = [own.leaves[number] for number in np.flatnonzero(is_apart).tolist()]
        if not leaves:
            return Filled((), rows), [], []
        parts: dict[str, list[StoredPart]] = {leaf.key: [] for leaf in leaves}
        for part in table.parts_of(parts):
            parts[part.key].append(part)
        findings = [f for key, known in parts.items() for f in not_covered(index[key], known)]
        if findings:
            return Filled(), [], findings
        filled, others = split_filled(parts, leaves, index)
    return Filled(filled, rows), others, []


def not_covered(stored: StoredTensor, checked: Sequence[StoredPart]) -> list[Finding]:
    """What the checksums do not say of a tensor: a lost row must not let its part pass."""
    expected = math.prod(stored.global_shape)
    found = sum(part.num_elements for part in checked)
    if found == expected:
        return []
    problem = "there are no checksums for all of it"
    return [Finding(problem, stored.key, expected=f"{expected} elements", found=found)]


def damage_of_objects(
    cells: Iterable[tuple[str, Ints]], known: Iterable[StoredPart], reader: StorageReader
) -> list[Finding]:
    """Compare the bytes of objects that lie among the tensors with their checksums."""
    digests = {(row.key, row.box.offset): row.digest for row in known}
    findings = []
    for key, cell in cells:
        expected = digests.get((key, cell))
        if expected is None:
            findings.append(Finding(f"there is no checksum for cell {cell} of the object", key))
            continue
        try:
            found = checksum_of_bytes(reader.object_bytes(key, cell))
        except CorruptCheckpointError as error:
            findings += in_words(error)
            continue
        if found != expected:
            findings.append(
                Finding(
                    f"cell {cell} of the object is not what was saved: its checksum differs",
                    key,
                    expected=f"{expected:016x}",
                    found=f"{found:016x}",
                    path=str(reader.checkpoint_dir),
                )
            )
    return findings


def damage_of(
    parts: Sequence[StoredPart],
    strategy: PlannedLoadStrategy,
    reader: StorageReader,
    index: Index,
    meter: Meter,
) -> list[Finding]:
    """Read stored parts, compare those that have a checksum, and say what is wrong with which.

    ``reader`` is used for all of them, and should be ``is_kept``. Not collective.

    Raises:
        OSError: if the file system, and not the checkpoint, fails.
    """
    meter.expect(sum(_num_bytes(part, index) for part in parts))
    most = strategy.options.buffer_bytes // 2
    # One piece of memory for all batches: an allocator would keep what each of them gave back.
    sizes = [_padded_bytes(part, index) for part in parts]
    memory = torch.empty(max(min(most, sum(sizes)), *sizes, 0), dtype=torch.uint8)
    findings = []
    for batch in in_batches(zip(parts, sizes, strict=True), len(memory)):
        findings += _verify(batch, reader, index, memory)
        meter.add(sum(_num_bytes(part, index) for part in batch))
    return findings


def _num_bytes(part: StoredPart, index: Index) -> int:
    return part.num_elements * index[part.key].dtype.itemsize


def _padded_bytes(part: StoredPart, index: Index) -> int:
    """Bytes of memory for a part, so that the next one begins where any dtype may."""
    return -(-_num_bytes(part, index) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _verify(
    batch: Sequence[StoredPart],
    reader: StorageReader,
    index: Index,
    memory: torch.Tensor,
) -> list[Finding]:
    leaves: dict[TreePath, ShardedTensor] = {}
    values: list[torch.Tensor] = []
    start = 0
    for number, part in enumerate(batch):
        leaf = ShardedTensor.of_box(index[part.key], part.box, part.flat_range)
        own = memory[start : start + _num_bytes(part, index)].view(leaf.dtype)
        leaf.data = own.view(part.box.shape if part.flat_range is None else -1)
        leaves[DictKey(number),] = leaf
        values.append(leaf.data)
        start += _padded_bytes(part, index)
    try:
        # Not by the planner of the strategy: it may put other values into memory.
        read(leaves, index, None, reader, SingleProcess())
    except RankFailedError as error:
        raise cause_of(error) from None
    except (CorruptCheckpointError, StateMismatchError) as error:
        if len(batch) == 1:
            return _unreadable(batch[0], error)
        # Some of them cannot even be read: find them by halves.
        middle = len(batch) // 2
        return [
            finding
            for half in (batch[:middle], batch[middle:])
            for finding in _verify(half, reader, index, memory)
        ]
    return [
        Finding(
            "checksum differs: bits were flipped after it was saved",
            part.key,
            expected=f"{part.digest or 0:016x}",
            found=f"{found:016x} in {part.box}",
            path=reader.location(stored_chunk(part, index)),
        )
        for part, value in zip(batch, values, strict=True)
        for found in [checksum(tensor_memory.as_numpy(value))]
        if part.digest is not None and found != part.digest
    ]


def cause_of(error: RankFailedError) -> BaseException:
    """What failed in a process that read alone: an I/O error stays what it is."""
    cause: BaseException = error
    while isinstance(cause, RankFailedError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def in_words(error: CheckpointingException) -> list[Finding]:
    """The findings of an error, without ranks; what is about no key says what was being done."""
    return [
        replace(
            finding,
            problem=finding.problem
            if finding.key is not None
            else f"{error.message}: {finding.problem}",
            ranks=(),
        )
        for finding in error.findings
    ]


def _unreadable(part: StoredPart, error: CheckpointingException) -> list[Finding]:
    """What is wrong with a part that cannot be read; every finding names its key and place."""
    where = str(part.box)
    return [
        replace(
            finding,
            key=part.key if finding.key is None else finding.key,
            found=where if finding.found is None else f"{finding.found} in {where}",
        )
        for finding in in_words(error) or [Finding(str(error), part.key)]
    ]


def stored_chunk(part: StoredPart, index: Index) -> MetadataIndex:
    """The chunk or piece in which a part begins."""
    tensor = index[part.key]
    if tensor.pieces is None:
        return MetadataIndex(part.key, part.box.offset)
    start = -1 if part.flat_range is None else part.flat_range[0]
    same = (tensor.pieces.offsets == part.box.offset).all(axis=1)
    rows = np.flatnonzero(same & (tensor.pieces.flat[:, 0] == start))
    if not len(rows):
        # A format may cut what it is given into smaller boxes: any of them says where to look.
        pieces, stop = tensor.pieces, np.array(part.box.stop)
        meets = (pieces.offsets < stop) & (pieces.offsets + pieces.shapes > part.box.offset)
        rows = np.flatnonzero(meets.all(axis=1))
    return MetadataIndex(part.key, part.box.offset, int(rows[0]))
