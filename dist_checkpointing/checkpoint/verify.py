"""Whether a checkpoint can be loaded, found out by reading all of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike

from dist_checkpointing.checkpoint.examination import Examination, Notes, _findings, said_once
from dist_checkpointing.checkpoint.handle import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
    merge_findings,
)
from dist_checkpointing.format.checksums import StoredPart
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.format.seal import read_seal
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.planning.coverage import find_coverage_problems
from dist_checkpointing.planning.shard_table import concatenate, describe
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import set_up_reader
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies.planned_strategies import PlannedLoadStrategy
from dist_checkpointing.strategies.verification import (
    damage_of,
    damage_of_objects,
    not_covered,
)

logger: logging.Logger = logging.getLogger(__name__)


def verify_checkpoint(
    checkpoint_dir: str | PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    trusted: bool = False,
) -> None:
    """Read a checkpoint and compare its checksums. Not collective.

    Every file must be as the seal of the save says, and no other file may lie among them. Where no
    checksums were kept, the data is read all the same, which finds what is missing, cut off or
    cannot be decoded, but no flipped bits. That a checkpoint has no seal is logged.

    Args:
        checkpoint_dir: folder or URL of a committed checkpoint.
        rank: number of the part of the work that is done here.
        world_size: number of parts.
        trusted: unpickle anything, see ``load``.

    Raises:
        CheckpointNotFoundError: if nothing is committed there.
        CorruptCheckpointError: with everything that is damaged.
        CheckpointingException: for what cannot be read here, see ``load``.
        OSError: if the file system, and not the checkpoint, fails: nothing is known then.

    Example:
        >>> from dist_checkpointing import save, verify_checkpoint
        >>> save({"step": 100}, "ckpt")
        >>> verify_checkpoint("ckpt")
    """
    found = examine_checkpoint(checkpoint_dir, rank=rank, world_size=world_size, trusted=trusted)
    if not found.is_sealed:
        logger.warning(
            "%s has no seal (it was saved by an older version or another program): flipped bits in"
            " common state and sharded objects are not found",
            checkpoint_dir,
        )
    if found.findings:
        raise CorruptCheckpointError("stored data is not what was saved", found.findings)
    if found.refused:
        raise UnsupportedFormatError("some of it cannot be read", found.refused)


def examine_checkpoint(
    checkpoint_dir: str | PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    trusted: bool = False,
    progress: ProgressOption | None = None,
) -> Examination:
    """Read all of a checkpoint and say what is wrong with it. Not collective.

    Looks at the commit, at what describes the checkpoint, at whether the stored parts cover every
    tensor once, at every part (its checksum, if there is one), and at objects and common state.

    Args:
        checkpoint_dir: folder or URL of a committed checkpoint.
        rank: number of the part of the work that is done here; rank 0 also looks at all that is
            not a tensor.
        world_size: number of parts.
        trusted: unpickle anything, see ``load``.
        progress: called with a Progress whenever something has been read.

    Raises:
        CheckpointNotFoundError: if nothing is committed there.
        StrategyNotFoundError: if nobody reads its backend.
        UnsupportedFormatError: if the tensors are stored in a way that is not read.
        OSError: if the file system, and not the checkpoint, fails: nothing is known then.
    """
    try:
        checkpoint = Checkpoint.open(checkpoint_dir, trusted=trusted)
    except CorruptCheckpointError as error:
        return Examination(_findings(error))
    seen = Notes()
    seal = seen.found(lambda: read_seal(checkpoint.folder))
    index = seen.found(lambda: checkpoint.index)
    if rank == 0:
        seen.look_at_state(checkpoint)
    if index is None:
        seen.look_at_files(checkpoint.folder, seal, rank, world_size)
        return Examination(merge_findings(seen.findings), merge_findings(seen.refused))
    keys = seen.plausible(checkpoint, index, sorted(index)[rank::world_size])
    digests = seen.checksums(checkpoint.folder, index)
    if rank == 0:
        seen.look_for_lost(checkpoint, index, digests)
        seen.look_at_what_others_read(checkpoint)
    parts = []
    for key in keys:
        parts += _parts(index[key], digests.get(key, []))
        if digests and not seen.lacks_checksums:
            seen.findings += not_covered(index[key], digests.get(key, []))
    seen.findings += _coverage_problems([index[key] for key in keys])
    meter = Meter("verify", rank, progress)
    with meter.phase("verifying"), seen.noting():
        seen.findings += _damage(checkpoint, parts, meter)
    if rank == 0 and seal is not None:
        with seen.noting():
            seen.findings += stored_objects_damage(checkpoint, seen.cells)
    seen.look_at_files(checkpoint.folder, seal, rank, world_size)
    sizes = [(part, part.num_elements * index[part.key].dtype.itemsize) for part in parts]
    return Examination(
        said_once(merge_findings(seen.findings), len(keys)),
        merge_findings(seen.refused),
        merge_findings(seen.remarks),
        len(keys),
        len(parts),
        sum(size for _, size in sizes),
        sum(size for part, size in sizes if part.digest is not None),
        seen.num_objects,
        seal is not None,
    )


def _parts(stored: StoredTensor, checked: Sequence[StoredPart]) -> list[StoredPart]:
    """What to read of a tensor: what has checksums if that is all of it, else every chunk too."""
    if sum(part.num_elements for part in checked) == math.prod(stored.global_shape):
        return list(checked)
    return [*checked, *(StoredPart(stored.key, box, flat) for box, flat in stored.parts())]


def _coverage_problems(tensors: Iterable[StoredTensor]) -> list[Finding]:
    """Tensors whose pieces leave gaps or overlap; a chunk grid does neither."""
    leaves: list[ShardedBase] = [
        ShardedTensor.of_box(stored, box, flat)
        for stored in tensors
        for box, flat in stored.pieces or ()
    ]
    if not leaves:
        return []
    try:
        table = concatenate([describe(leaves, 0)])
    except InvalidShardingError as error:
        return list(_findings(error))
    written = table.take(table.num_elements > 0)
    return [
        replace(
            finding,
            problem=f"the stored pieces do not make it up once: {finding.problem}",
            expected=None,
            ranks=(),
            remedy=None,
        )
        for finding in find_coverage_problems(table, written)
    ]


def _damage(checkpoint: Checkpoint, parts: Sequence[StoredPart], meter: Meter) -> list[Finding]:
    """Read all parts, and say what is wrong with which."""
    strategy = checkpoint.reads.sharded
    if not isinstance(strategy, PlannedLoadStrategy):
        return _damage_unplanned(checkpoint, parts, meter)
    reader = checkpoint.reads.make_reader()
    index = checkpoint.reads.index_for(reader, checkpoint.index)
    # What all parts need, such as a database that can be opened, is missed once and not by each.
    read({}, index, strategy.planner, reader, SingleProcess())
    # An index of another format, or of another save, may name what this reader does not find.
    unknown = dict.fromkeys(part.key for part in parts if part.key not in index)
    where = str(checkpoint.folder)
    findings = [Finding("in the index, and nowhere else", key, path=where) for key in unknown]
    known = [part for part in parts if part.key not in unknown]
    return findings + damage_of(known, strategy, reader, index, meter)


def stored_objects_damage(checkpoint: Checkpoint, known: Sequence[StoredPart]) -> list[Finding]:
    """Compare the objects that lie among the tensors with their checksums."""
    strategy = checkpoint.reads.sharded
    if not isinstance(strategy, PlannedLoadStrategy) or not checkpoint.index.objects:
        return []
    reader = strategy.make_reader(checkpoint.folder)
    set_up_reader(
        reader, checkpoint.reads.index_for(reader, checkpoint.index), rank=0, world_size=1
    )
    cells = [(key, cell) for key, handle in checkpoint.objects.items() for cell in handle]
    return damage_of_objects(cells, known, reader)


def _damage_unplanned(
    checkpoint: Checkpoint, parts: Sequence[StoredPart], meter: Meter
) -> list[Finding]:
    findings: list[Finding] = []
    keys = list(dict.fromkeys(part.key for part in parts))
    meter.expect(sum(checkpoint[key].num_bytes for key in keys))
    for key in keys:
        try:
            _ = checkpoint[key][...]
        except CorruptCheckpointError as error:
            findings += _findings(error, key)
        meter.add(checkpoint[key].num_bytes)
    return findings
