"""Whether stored parts, or memory that a load has filled, are what was saved."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final, Self

import numpy as np
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
from dist_checkpointing.format import checksums
from dist_checkpointing.format.geometry import (
    Box,
    Ints,
    Window,
    may_overlap,
    padded,
    padded_rows,
    split_rows,
)
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.seal import Seal, check_config, check_files, read_seal
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, tensor_memory
from dist_checkpointing.planning import DefaultLoadPlanner, MetadataIndex
from dist_checkpointing.planning.load_plan import WantedTable, contiguous_ranges, misfits
from dist_checkpointing.planning.shard_table import Bools, Int64s
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader, set_up_reader
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.base import handles_objects
from dist_checkpointing.strategies.chunk_reads import SMALL_BYTES
from dist_checkpointing.strategies.selection import OpenedCheckpoint
from dist_checkpointing.strategies.unplanned_strategies import ForeignReader
from dist_checkpointing.threads import in_threads, paused_collector

logger: logging.Logger = logging.getLogger(__name__)
FLIPPED: Final = "checksum differs: bits were flipped after it was saved"
_ALIGNMENT_BYTES: Final = 64
_OTHER: Final = "stored data is not what was saved"
_BLOCK_ROWS: Final = 1024

_MOST_ELEMENTS: Final = 2.0**40
"""Of a tensor; more may not fit into a column."""


@dataclass(frozen=True, slots=True, eq=False)
class FilledRows:
    """Stored parts that a load puts whole and as they are into runs of CPU memory, one a row."""

    table: checksums.ChecksumColumns
    addresses: Int64s
    num_bytes: Int64s

    def differing(self, report: Callable[[int], None]) -> list[tuple[checksums.StoredPart, int]]:
        """The parts whose memory does not have the checksum of the save, with the one it has."""
        differ: list[tuple[checksums.StoredPart, int]] = []
        for start in range(0, len(self.addresses), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            num_bytes = self.num_bytes[block]
            found = checksums.checksums_at(self.addresses[block], num_bytes)
            is_other = found != self.table.digests[block]
            if is_other.any():
                parts = self.table.parts_at(start + np.flatnonzero(is_other))
                differ += zip(parts, found[is_other].tolist(), strict=True)
            report(int(num_bytes.sum()))
        return differ


def filled_rows(
    tables: Sequence[checksums.ChecksumColumns], wanted: WantedTable, index: Index
) -> tuple[list[FilledRows], Bools]:
    """The small stored parts that lie in runs of the memory of leaves.

    Returns:
        Such parts; and for which tensors they are everything. The checksums cover such a tensor
        once, and its leaf gets nothing of a part that is not among the rows. The parts of the other
        tensors must be looked at one by one.
    """
    itemsizes = index.itemsizes_of(wanted.keys)
    shapes, _ = index.shapes_of(wanted.keys)
    stored = padded_rows(shapes, 1)
    numbers, types = index.dtypes_of(wanted.keys)
    known = {dtype.torch: number for number, dtype in enumerate(types) if dtype is not None}
    lengths = np.diff(wanted.flat)[:, 0]
    counts = np.where(wanted.flat[:, 0] >= 0, lengths, wanted.shapes.prod(axis=1))
    # In CPU memory in C order, and in the stored dtype.
    is_whole: Bools = numbers == [known.get(dtype, -1) for dtype in wanted.data_dtypes]
    is_whole &= (wanted.addresses >= 0) & (wanted.num_bytes == counts * itemsizes)
    is_whole &= wanted.ndim == np.fromiter(map(len, shapes), dtype=np.int32, count=len(shapes))
    is_whole &= stored.astype(np.float64).prod(axis=1) < _MOST_ELEMENTS
    leaf_of = {key: leaf for leaf, key in enumerate(wanted.keys)}
    if len(leaf_of) < len(wanted):
        times = Counter(wanted.keys)
        is_whole &= [times[key] == 1 for key in wanted.keys]
    counted = np.zeros(len(wanted), dtype=np.int64)
    located = []
    for table in tables:
        names = np.fromiter(map(leaf_of.get, table.names, repeat(-1)), dtype=np.int64)
        leaves = np.where(table.is_object == 0, names[table.keys], -1)
        rows = np.flatnonzero(leaves >= 0)
        leaves = leaves[rows]
        starts, counts, is_direct, is_other = _locate(table, rows, wanted, leaves)
        is_whole[leaves[is_other]] = False
        np.add.at(counted, leaves, counts)
        located.append((table, rows, leaves, starts, counts, is_direct))
    is_whole &= counted == stored.prod(axis=1)
    direct = []
    for table, rows, leaves, starts, counts, is_direct in located:
        kept = is_direct & is_whole[leaves]
        filled = leaves[kept]
        items = itemsizes[filled]
        addresses = wanted.addresses[filled] + starts[kept] * items
        # With the keys of the leaves, because those of the table take as much memory again.
        renamed = table.renamed(rows[kept], wanted.keys, filled)
        direct.append(FilledRows(renamed, addresses, counts[kept] * items))
    return direct, is_whole


def _locate(
    table: checksums.ChecksumColumns, rows: Int64s, wanted: WantedTable, leaves: Int64s
) -> tuple[Int64s, Int64s, Bools, Bools]:
    """Where stored parts lie in the memory of leaves.

    Returns:
        First element and number of elements; which parts are small and one run there; and which
        are not, though the leaf gets something of them, or are not small.
    """
    ndim, width = table.ndim[rows], wanted.offsets.shape[1]
    is_axis = np.arange(table.offsets.shape[1]) < ndim[:, None]
    offsets = padded(np.where(is_axis, table.offsets[rows], 0), width, 0)[:, :width]
    extents = padded(np.where(is_axis, table.shapes[rows], 1), width, 1)[:, :width]
    flat, wanted_flat = table.flat[rows], wanted.flat[leaves]
    is_flat = flat[:, 0] >= 0
    is_small = ndim == wanted.ndim[leaves]
    is_small &= (extents > 0).all(axis=1) & (offsets >= 0).all(axis=1)
    is_small &= extents.astype(np.float64).prod(axis=1) <= SMALL_BYTES
    extents = np.where(is_small[:, None], extents, 1)
    counts = np.where(is_flat, flat[:, 1] - flat[:, 0], extents.prod(axis=1))
    is_small &= (counts > 0) & (counts <= SMALL_BYTES)
    within, shapes = offsets - wanted.offsets[leaves], wanted.shapes[leaves]
    is_inside = ((within >= 0) & (within + extents <= shapes)).all(axis=1)
    meets = ((within < shapes) & (within + extents > 0)).all(axis=1)
    zeros = np.zeros(len(rows), dtype=np.int64)
    starts, is_run = contiguous_ranges(zeros, shapes, within, extents)
    is_same = (within == 0).all(axis=1) & (extents == shapes).all(axis=1)
    is_same &= (flat == wanted_flat).all(axis=1)
    is_plain = ~is_flat & (wanted_flat[:, 0] < 0)
    is_direct = is_small & (is_flat & is_same | is_plain & is_inside & is_run)
    starts[is_flat] = 0
    is_other = ~is_small | meets & ~is_direct
    return starts, np.where(is_small, counts, 0), is_direct, is_other


_BLOCK_BYTES: Final = 2**22
"""At most so much of what does not lie in one run of CPU memory is copied at a time."""

FilledPart = tuple[checksums.StoredPart, torch.Tensor]
"""A part, with its checksum, that a load puts whole and as it is into the memory of one leaf."""


Filled = tuple[Sequence[FilledPart], Sequence[FilledRows]]
"""What a load puts into memory as it is, to be compared afterwards; small parts as rows."""


def split_filled(
    parts: Mapping[str, Sequence[checksums.StoredPart]],
    leaves: Sequence[ShardedTensor],
    index: Index,
) -> tuple[list[FilledPart], list[checksums.StoredPart]]:
    """The stored parts that leaves get whole, and the other ones that leaves get something of."""
    wanted: dict[str, list[ShardedTensor]] = {}
    for leaf in leaves:
        wanted.setdefault(leaf.key, []).append(leaf)
    filled, others = [], []
    for key, known in parts.items():
        dtype = index[key].dtype.torch
        for part in known:
            found = (values_of(leaf, part, dtype) for leaf in wanted[key])
            values = next((memory for memory in found if memory is not None), None)
            if values is not None:
                filled.append((part, values))
            elif any(
                may_overlap((part.box, part.flat_range), (leaf.box, leaf.flat_range))
                for leaf in wanted[key]
            ):
                others.append(part)
    return filled, others


def values_of(
    leaf: ShardedTensor, part: checksums.StoredPart, dtype: torch.dtype
) -> torch.Tensor | None:
    """The memory of a leaf that holds a stored part; None if it does not hold all of it as is."""
    data, box, wanted, stored = leaf.data, leaf.box, leaf.flat_range, part.flat_range
    if data is None or data.dtype is not dtype:
        return None
    if wanted == stored and part.box == box and not leaf.prepend_axis_num:
        return data
    if not box.contains(part.box):
        return None
    within = part.box.relative_to(box.offset)
    if wanted is None and stored is None:
        return data[(None,) * leaf.prepend_axis_num][within.slices()]
    run = Window(0, box.shape, within).contiguous_range()
    if run is None or not (wanted or data.is_contiguous()):
        return None
    start, stop = run if stored is None else (run[0] + stored[0], run[0] + stored[1])
    first, end = wanted or (0, box.num_elements)
    return data.view(-1)[start - first : stop - first] if first <= start <= stop <= end else None


def verify_filled(filled: Filled, options: StorageOptions, meter: Meter) -> None:
    """Compare the memory of filled parts with their checksums. Not collective.

    A CheckpointingException names every part that differs; the stored data may be good
    nevertheless, which another read tells.
    """
    parts, rows = filled
    meter.expect(sum(v.nbytes for _, v in parts) + sum(int(t.num_bytes.sum()) for t in rows))
    small = [pair for pair in parts if pair[1].nbytes <= SMALL_BYTES]
    large = [pair for pair in parts if pair[1].nbytes > SMALL_BYTES]

    def compare(filled: FilledPart) -> tuple[checksums.StoredPart, int]:
        part, values = filled
        found = checksums.checksum_of(_blocks(values))
        meter.add(values.nbytes)
        return part, found

    # Many small parts are work for the interpreter: threads would only take turns.
    with paused_collector():
        digests = [found for table in rows for found in table.differing(meter.add)]
        digests += [compare(pair) for pair in small]
    digests += in_threads(compare, large, options.threads)
    remedy = (
        "Give each leaf separate memory. If it has, memory or the file system of this machine "
        "changes what is read."
    )
    problem = "memory does not hold what was saved, though another read of it does"
    findings = [
        other_digest(problem, part, found, remedy=remedy)
        for part, found in digests
        if found != part.digest
    ]
    CheckpointingException.raise_if(findings, "what was loaded is not what is stored")


def _blocks(values: torch.Tensor) -> Iterator[checksums.Array]:
    """The values of a tensor on any device, as contiguous arrays in C order."""
    values = values.detach()
    if tensor_memory.is_plain_memory(values):
        yield tensor_memory.as_numpy(values)
        return
    for block in split_rows(Box.whole(tuple(values.shape)), _BLOCK_BYTES // values.itemsize):
        yield np.ascontiguousarray(tensor_memory.as_numpy(values[block.slices()].cpu()))


@dataclass(slots=True, eq=False)
class Verifier:
    """Verifies what a load reads; every rank calls it alike.

    ``wanted`` has memory to fill, and ``objects`` are cells; ``meter`` counts what is verified.
    """

    opened: OpenedCheckpoint
    wanted: WantedTable
    objects: Sequence[ShardedObject]
    meter: Meter
    _filled: Filled = ((), ())

    def start(self) -> Self:
        """Verify what the load does not read whole, before anything is filled. Collective."""
        with self._all_findings():
            planner = self.opened.strategies.sharded.planner
            # Nobody knows what a planner of a user puts into memory.
            is_known = planner is None or type(planner) is DefaultLoadPlanner
            self._filled = self._verify(self.wanted) if is_known else self._verify_all()
        return self

    @contextmanager
    def comparing_memory(self) -> Iterator[None]:
        """Verify what the body has read; if either fails, say all that is damaged. Collective."""
        with self._all_findings():
            yield
        try:
            with self.meter.phase("verifying"), self.opened.comm.agreed("verifying checksums"):
                verify_filled(self._filled, self.opened.reader.options, self.meter)
        except RankFailedError:
            raise
        except CheckpointingException:
            self._verify_all()
            raise

    @contextmanager
    def _all_findings(self) -> Iterator[None]:
        """Where one rank meets damage first, let all ranks look for all damage, and raise that."""
        try:
            yield
        except (CorruptCheckpointError, StateMismatchError):
            self._verify_all()
            raise

    def _verify_all(self) -> Filled:
        return self._verify(WantedTable.of(leaf.without_data() for leaf in self.wanted.tensors))

    def _verify(self, wanted: WantedTable) -> Filled:
        """Verify what a load reads, before it is read. Collective.

        Stored parts that fill memory of the wanted tensors are only looked up: the load reads them,
        and ``verify_filled`` compares them then. All other ones are read here. Without memory, that
        is everything. Without a seal only tensors can be verified.
        """
        opened, objects = self.opened, self.objects
        folder, reader, index = opened.folder, opened.reader, opened.index
        if not reader.has_checksums:
            if opened.comm.rank == 0:
                what = "sizes and headers of its files are verified, the values are not"
                logger.warning("%s: its format has no checksums: %s", folder, what)
            return (), ()
        has_objects = bool(objects) and handles_objects(opened.strategies.sharded)
        with self.meter.phase("verifying"):
            # One rank reads it, as thousands of ranks would wait for each other at one file.
            seal: Seal | None = opened.comm.from_rank0(
                "reading the seal", lambda: read_seal(folder)
            )
            with opened.comm.agreed("verifying checksums"):
                tables = self._tables(wanted, seal, has_objects=has_objects)
                filled, others, findings = _looked_up(tables, wanted, index)
                findings += damage_of(others, reader, index, self.meter)
                if seal is not None and has_objects:
                    misfitting = [finding for leaf in objects for finding in misfits(leaf, index)]
                    if misfitting and not findings:
                        problem = "the checkpoint does not hold what is wanted"
                        raise StateMismatchError(problem, misfitting)
                    set_up_reader(reader, index, rank=0, world_size=1)
                    cells = [(leaf.key, tuple(leaf.global_offset)) for leaf in objects]
                    known = [cell for table in tables for cell in table.objects()]
                    findings += damage_of_objects(cells, known, reader)
                CorruptCheckpointError.raise_if(findings, _OTHER)
        return filled

    def _tables(
        self, wanted: WantedTable, seal: Seal | None, *, has_objects: bool
    ) -> list[checksums.ChecksumColumns]:
        """The tables of checksums, after all files that the seal speaks of have been compared."""
        opened, objects = self.opened, self.objects
        folder, index, keys = opened.folder, opened.index, dict.fromkeys(wanted.keys)
        if seal is None or seal.is_open:
            logger.warning(
                "%s %s: the common state and sharded objects in files are not verified",
                folder,
                "has no seal" if seal is None else "has an open seal (an interrupted removal)",
            )
            tables = checksums.read_tables(folder)
        else:
            by_common = [] if has_objects else objects
            names = [*opened.strategies.common.file_names(by_common, folder)]
            # A file that was saved and is gone was lost, and not only asked for by mistake.
            files = (f"{leaf.unique_key}.pt" for leaf in by_common)
            names += [name for name in files if name in seal.files and name not in names]
            if keys or has_objects:
                names += opened.reader.describing_names(keys)
            asked = seal.tables_with([*keys, *(leaf.key for leaf in objects)])
            findings = check_config(seal, folder) + check_files(seal, folder, [*names, *asked])
            CorruptCheckpointError.raise_if(findings, _OTHER)
            tables = checksums.read_tables(folder, asked)
        has_parts = any((part.is_object == 0).any() for part in tables)
        if not has_parts and any(0 not in index[k].global_shape for k in keys if k in index):
            finding = Finding(
                "no checksums were kept when it was saved",
                path=str(folder),
                remedy="Load without verify: what cannot be read is found, flipped bits are not.",
            )
            raise UnsupportedFormatError("the checkpoint cannot be verified", [finding])
        return tables


def _looked_up(
    tables: Sequence[checksums.ChecksumColumns], wanted: WantedTable, index: Index
) -> tuple[Filled, list[checksums.StoredPart], list[Finding]]:
    """The parts that fill memory, the others that are wanted, and what no checksum speaks of."""
    rows: list[FilledRows] = []
    with paused_collector():
        is_apart = index.rows_of(wanted.keys) >= 0
        if is_apart.all():
            rows, is_whole = filled_rows(tables, wanted, index)
            is_apart = ~is_whole
        leaves = [wanted.tensors[number] for number in np.flatnonzero(is_apart).tolist()]
        if not leaves:
            return ((), rows), [], []
        parts, findings = parts_of(tables, (leaf.key for leaf in leaves), index)
        if findings:
            return ((), ()), [], findings
        filled, others = split_filled(parts, leaves, index)
    return (filled, rows), others, []


def parts_of(
    tables: Iterable[checksums.ChecksumColumns], keys: Iterable[str], index: Index
) -> tuple[dict[str, list[checksums.StoredPart]], list[Finding]]:
    """The parts of tensors that have a checksum, by key; and of which tensor they are not all."""
    parts: dict[str, list[checksums.StoredPart]] = {key: [] for key in keys}
    for part in (part for table in tables for part in table.parts(parts)):
        parts[part.key].append(part)
    return parts, [f for key, known in parts.items() for f in not_covered(index[key], known)]


def not_covered(stored: StoredTensor, checked: Sequence[checksums.StoredPart]) -> list[Finding]:
    """What the checksums do not say of a tensor: a lost row must not let its part pass."""
    if not all(part.lies_in(stored.global_shape) for part in checked):
        return [Finding("a checksum of what is no part of the tensor", stored.key)]
    expected = math.prod(stored.global_shape)
    found = sum(part.num_elements for part in checked)
    if found == expected:
        return []
    problem = "there are no checksums for all of it"
    return [Finding(problem, stored.key, expected=f"{expected} elements", found=found)]


def damage_of_objects(
    cells: Iterable[tuple[str, Ints]], known: Iterable[checksums.StoredPart], reader: StorageReader
) -> list[Finding]:
    """Compare the bytes of objects that lie among the tensors with their checksums."""
    if isinstance(reader, ForeignReader):
        return []  # it does not tell bytes, and no save has kept checksums of them
    digests = {(row.key, row.box.offset): row.digest for row in known}
    findings = []
    for key, cell in cells:
        expected = digests.get((key, cell))
        if expected is None:
            findings.append(Finding(f"there is no checksum for cell {cell} of the object", key))
            continue
        try:
            found = checksums.checksum_of([np.frombuffer(reader.object_bytes(key, cell), np.uint8)])
        except CorruptCheckpointError as error:
            findings += in_words(error)
            continue
        if found != expected:
            problem = f"cell {cell} of the object is not what was saved: its checksum differs"
            digests_of = f"{expected:016x}", f"{found:016x}"
            findings.append(Finding(problem, key, *digests_of, path=str(reader.checkpoint_dir)))
    return findings


def damage_of(
    parts: Sequence[checksums.StoredPart], reader: StorageReader, index: Index, meter: Meter
) -> list[Finding]:
    """Read stored parts, compare those that have a checksum, and say what is wrong with which.

    The reader, used for all of them, should be ``is_kept``. Not collective. An OSError says that
    the file system failed, and not the checkpoint.
    """
    sizes = [part.num_elements * index[part.key].dtype.itemsize for part in parts]
    meter.expect(sum(sizes))
    places = list(map(_aligned, sizes))
    most = reader.options.buffer_bytes // 2
    # One piece of memory for all batches: an allocator would keep what each of them gave back.
    memory = torch.empty(max(min(most, sum(places)), *places, 0), dtype=torch.uint8)
    findings = []
    for batch in in_batches(zip(zip(parts, sizes, strict=True), places, strict=True), len(memory)):
        findings += _damage_of_batch(batch, reader, index, memory)
        meter.add(sum(size for _, size in batch))
    return findings


def _aligned(num_bytes: int) -> int:
    """Bytes of memory for a part, so that the next one begins where any dtype may."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _damage_of_batch(
    batch: Sequence[tuple[checksums.StoredPart, int]],
    reader: StorageReader,
    index: Index,
    memory: torch.Tensor,
) -> list[Finding]:
    """Read parts, given with their bytes, into memory, and compare them."""
    leaves: list[ShardedTensor] = []
    values: list[torch.Tensor] = []
    start = 0
    for part, size in batch:
        leaf = ShardedTensor.of_box(index[part.key], part.box, part.flat_range)
        flat = memory[start : start + size].view(leaf.dtype)
        leaf.data = flat.view(part.box.shape if part.flat_range is None else -1)
        leaves.append(leaf)
        values.append(leaf.data)
        start += _aligned(size)
    try:
        # Not by the planner of the strategy: it may put other values into memory.
        read(WantedTable.of(leaves), index, None, reader, SingleProcess())
    except RankFailedError as error:
        raise cause_of(error) from None
    except (CorruptCheckpointError, StateMismatchError) as error:
        if len(batch) == 1:
            return _unreadable(batch[0][0], error)
        # Some of them cannot even be read: find them by halves.
        middle = len(batch) // 2
        return [
            finding
            for half in (batch[:middle], batch[middle:])
            for finding in _damage_of_batch(half, reader, index, memory)
        ]
    return [
        other_digest(FLIPPED, part, found, path=reader.location(stored_chunk(part, index)))
        for (part, _), value in zip(batch, values, strict=True)
        if part.digest is not None
        for found in [checksums.checksum_of([tensor_memory.as_numpy(value)])]
        if found != part.digest
    ]


def other_digest(problem: str, part: checksums.StoredPart, digest: int, **details: Any) -> Finding:
    """That a part has another checksum than the save has kept."""
    expected, found = f"{part.digest or 0:016x}", f"{digest:016x} in {part.box}"
    return Finding(problem, part.key, expected, found, **details)


def cause_of(error: BaseException) -> BaseException:
    """What failed in a process that read alone: an I/O error stays what it is."""
    while isinstance(error, RankFailedError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def in_words(error: CheckpointingException) -> list[Finding]:
    """The findings of an error, without ranks; what is about no key says what was being done."""
    doing = f"{error.message}: "
    return [
        replace(f, problem=f"{'' if f.key is not None else doing}{f.problem}", ranks=())
        for f in error.findings
    ]


def _unreadable(part: checksums.StoredPart, error: CheckpointingException) -> list[Finding]:
    """What is wrong with a part that cannot be read; every finding names its key and place."""
    findings = in_words(error) or [Finding(str(error))]
    return [
        replace(
            finding,
            key=part.key if finding.key is None else finding.key,
            found=f"{'' if finding.found is None else f'{finding.found} in '}{part.box}",
        )
        for finding in findings
    ]


def stored_chunk(part: checksums.StoredPart, index: Index) -> MetadataIndex:
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
