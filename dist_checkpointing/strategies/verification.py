"""Reads stored parts once more and compares their checksums."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

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
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import (
    CHECKSUMS_NAME,
    ChecksumTable,
    StoredPart,
    checksum,
    checksum_files,
    checksum_of_bytes,
    concatenate_tables,
    read_table,
)
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index, StoredTensor
from dist_checkpointing.format.seal import Seal, check_config, check_files
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, tensor_memory
from dist_checkpointing.mapping.nested_dicts import DictKey
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.planning import MetadataIndex
from dist_checkpointing.planning.planners import misfits
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader, set_up_reader
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from dist_checkpointing.strategies.filled_parts import Filled, FilledRows, filled_rows, split_filled
from dist_checkpointing.strategies.planned import PlannedLoadStrategy
from dist_checkpointing.strategies.selection import handles_objects
from dist_checkpointing.threads import paused_collector

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
