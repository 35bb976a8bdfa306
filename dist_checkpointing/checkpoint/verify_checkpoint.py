"""``verify_checkpoint``: all that is wrong with a whole checkpoint, as findings: files, index,
objects, data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    RankFailedError,
    StateMismatchError,
    UnsupportedFormatError,
    merge_findings,
)
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import (
    ChecksumColumns,
    StoredPart,
    checksum_files,
    read_table,
)
from dist_checkpointing.format.index import StoredTensor, large_tensors
from dist_checkpointing.format.seal import Seal, check_config, check_files, read_seal, unnamed_files
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.planning.coverage import find_coverage_problems
from dist_checkpointing.planning.shard_table import concatenate, describe
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies import verification
from dist_checkpointing.strategies.base import PathOrStr

T = TypeVar("T")


@dataclass
class Examination:
    """What reading all of a checkpoint has shown.

    ``findings`` are damage, with key, place and file; ``refused`` are objects and common state that
    hold more than plain data types; ``remarks`` are strange, and may be intended. Parts and bytes
    are those that were read, and whose checksum was compared; objects are counted by cells.
    """

    findings: list[Finding] = field(default_factory=list)
    refused: list[Finding] = field(default_factory=list)
    remarks: list[Finding] = field(default_factory=list)
    num_tensors: int = 0
    num_parts: int = 0
    num_bytes: int = 0
    num_bytes_compared: int = 0
    num_objects: int = 0
    is_sealed: bool = False

    @property
    def is_sound(self) -> bool:
        return not self.findings

    @classmethod
    def joined(cls, of_ranks: Sequence[Examination]) -> Examination:
        """What ranks have seen together, each of its part; rank 0 has counted all else."""
        found = replace(of_ranks[0])
        for name in ("findings", "refused", "remarks"):
            every = chain.from_iterable(getattr(own, name) for own in of_ranks)
            setattr(found, name, [*merge_findings(every)])
        for name in ("num_tensors", "num_parts", "num_bytes", "num_bytes_compared"):
            setattr(found, name, sum(getattr(own, name) for own in of_ranks))
        return found


class Notes(Examination):
    @contextmanager
    def noting(self, key: str | None = None, *, unpickles: bool = False) -> Iterator[None]:
        """Note what is damaged in the body, or what it does not unpickle, and go on."""
        try:
            yield
        except (CorruptCheckpointError, StateMismatchError) as error:
            self.findings.extend(_findings(error, key))
        except UnsupportedFormatError as error:
            if not unpickles:
                raise
            self.refused.extend(_findings(error, key))
        except RankFailedError as error:
            # Of this process alone: what it met says nothing about the checkpoint.
            raise verification.cause_of(error) from None

    def found(self, look: Callable[[], T]) -> T | None:
        """What there is; None, and a note, if that is damaged."""
        found: list[T] = []
        with self.noting():
            found.append(look())
        return found[0] if found else None

    def look_at_files(
        self, folder: Location, seal: Seal | None, rank: int, world_size: int
    ) -> None:
        """Compare the files with what the seal says of them."""
        if seal is None:
            return
        if seal.is_open:
            problem = "a removal is running or was interrupted: files are not compared"
            self.remarks.append(Finding(problem, path=str(folder), remedy="Remove them once more."))
            return
        findings = check_files(seal, folder, sorted(seal.files)[rank::world_size])
        if rank == 0:
            findings += check_config(seal, folder)
            self.remarks.extend(
                Finding("this file is not part of the checkpoint", path=str(folder / name))
                for name in unnamed_files(seal, folder)
            )
        # What was found out by reading says more than that the file is another one.
        said = [str(finding.path) for finding in self.findings]
        self.findings.extend(
            finding for finding in findings if not any(str(finding.path) in path for path in said)
        )

    def look_at_state(self, checkpoint: Checkpoint) -> None:
        with self.noting(unpickles=True):
            _ = checkpoint.common
        with self.noting():
            for key, handle in checkpoint.objects.items():
                for cell in handle:
                    with self.noting(key, unpickles=True):
                        _ = handle[cell]
                        self.num_objects += 1

    def checksums(self, folder: Location) -> list[ChecksumColumns]:
        tables = []
        for path in checksum_files(folder):
            with self.noting():
                tables.append(read_table(path))
        return tables

    def look_at_what_others_read(self, checkpoint: Checkpoint) -> None:
        """Our readers have the index; zarr-python and xarray need the consolidated metadata."""
        if checkpoint.backend != ("zarr", 2):
            return
        # Not at the top: the package zarr may be missing.
        from dist_checkpointing.strategies.zarr import rebuild_index  # noqa: PLC0415

        try:
            rebuild_index(checkpoint.folder)
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            self.findings.extend(
                replace(f, problem=f"zarr-python cannot open it, our readers can: {f.problem}")
                for f in error.findings
            )


def said_once(findings: Sequence[Finding], num_tensors: int) -> list[Finding]:
    """The findings; what keeps every single tensor from being read becomes one."""
    alike: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.problem, finding.path), []).append(finding)
    found: list[Finding] = []
    for same in alike.values():
        keys = {finding.key for finding in same if finding.key is not None}
        if len(keys) >= max(2, num_tensors):
            what = f"nothing: {len(keys)} keys cannot be read"
            found.append(replace(same[0], key=None, expected=None, found=what))
        else:
            found += same
    return found


def _findings(error: Exception, key: str | None = None) -> tuple[Finding, ...]:
    if not isinstance(error, CheckpointingException) or not error.findings:
        return (Finding(f"{type(error).__name__}: {error}", key),)
    return tuple(replace(found, key=found.key or key) for found in verification.in_words(error))


logger: logging.Logger = logging.getLogger(__name__)


def verify_checkpoint(
    checkpoint_dir: PathOrStr, *, rank: int = 0, world_size: int = 1, trusted: bool = False
) -> None:
    """Read a checkpoint and compare its checksums. Not collective.

    Every file must be as the seal of the save says; other files are not looked at. Where no
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
    CorruptCheckpointError.raise_if(found.findings, "stored data is not what was saved")
    UnsupportedFormatError.raise_if(found.refused, "some of it cannot be read")


def examine_checkpoint(
    checkpoint_dir: PathOrStr,
    *,
    rank: int = 0,
    world_size: int = 1,
    trusted: bool = False,
    progress: ProgressOption | None = None,
) -> Examination:
    """Read all of a checkpoint and say what is wrong with it. Not collective.

    Looks at the commit, at what describes the checkpoint, at whether the stored parts cover every
    tensor once, at every part (its checksum, if there is one), and at objects and common state.

    The arguments are those of ``verify_checkpoint``, which names the errors too; ``progress`` is
    called whenever something has been read. Rank 0 also looks at all that is not a tensor.
    """
    try:
        checkpoint = Checkpoint.open(checkpoint_dir, trusted=trusted)
    except CorruptCheckpointError as error:
        return Examination([*_findings(error)])
    seen = Notes()
    seal = seen.found(lambda: read_seal(checkpoint.folder))
    seen.is_sealed = seal is not None
    index = seen.found(lambda: checkpoint.index)
    if rank == 0:
        seen.look_at_state(checkpoint)
    if index is None:
        seen.look_at_files(checkpoint.folder, seal, rank, world_size)
        return Examination.joined([seen])
    keys, known = sorted(index)[rank::world_size], len(seen.findings)
    with seen.noting():
        checkpoint.reads.require_stored(large_tensors(index, keys), index)
    # What the files cannot hold is damaged, and is not looked at.
    lost = {finding.key for finding in seen.findings[known:]}
    keys = [key for key in keys if key not in lost]
    known = len(seen.findings)
    tables = seen.checksums(checkpoint.folder)
    is_table_lost = len(seen.findings) > known
    if rank == 0:
        seen.look_at_what_others_read(checkpoint)
    digests, not_covered = verification.parts_of(tables, keys, index)
    if any((table.is_object == 0).any() for table in tables) and not is_table_lost:
        seen.findings += not_covered
    parts = []
    for key in keys:
        stored = index[key]
        checked = [part for part in digests[key] if part.lies_in(stored.global_shape)]
        # What has checksums, if that is all of it; else every chunk too.
        parts += checked
        if sum(part.num_elements for part in checked) != math.prod(stored.global_shape):
            parts += [StoredPart(key, box, flat) for box, flat in stored.parts()]
    seen.findings += _coverage_problems([index[key] for key in keys])
    meter = Meter("verify", rank, progress)
    with meter.phase("verifying"), seen.noting():
        seen.findings += _damage(checkpoint, parts, meter)
    if rank == 0 and seal is not None:
        with seen.noting():
            cells = [cell for table in tables for cell in table.objects()]
            seen.findings += stored_objects_damage(checkpoint, cells)
    seen.look_at_files(checkpoint.folder, seal, rank, world_size)
    sizes = [(part, part.num_elements * index[part.key].dtype.itemsize) for part in parts]
    seen.num_tensors, seen.num_parts = len(keys), len(parts)
    seen.num_bytes = sum(size for _, size in sizes)
    seen.num_bytes_compared = sum(size for part, size in sizes if part.digest is not None)
    seen.findings = said_once(merge_findings(seen.findings), len(keys))
    return Examination.joined([seen])


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
    problem = "the stored pieces do not make it up once"
    return [
        Finding(f"{problem}: {f.problem}", f.key, found=f.found, path=f.path)
        for f in find_coverage_problems(table, written)
    ]


def _damage(checkpoint: Checkpoint, parts: Sequence[StoredPart], meter: Meter) -> list[Finding]:
    """Read all parts, and say what is wrong with which."""
    strategy = checkpoint.reads.sharded
    index = checkpoint.reads.index_for(checkpoint.index)
    reader = checkpoint.reads.make_reader()
    # What all parts need, such as a database that can be opened, is missed once and not by each.
    read({}, index, strategy.planner, reader, SingleProcess())
    # An index of another format, or of another save, may name what this reader does not find.
    unknown = dict.fromkeys(part.key for part in parts if part.key not in index)
    where = str(checkpoint.folder)
    findings = [Finding("in the index, and nowhere else", key, path=where) for key in unknown]
    known = [part for part in parts if part.key not in unknown]
    return findings + verification.damage_of(known, reader, index, meter)


def stored_objects_damage(checkpoint: Checkpoint, known: Sequence[StoredPart]) -> list[Finding]:
    """Compare the objects that lie among the tensors with their checksums."""
    if not checkpoint.index.objects:
        return []
    reader = checkpoint.reads.set_up_reader(checkpoint.index)
    cells = [(key, cell) for key, handle in checkpoint.objects.items() for cell in handle]
    return verification.damage_of_objects(cells, known, reader)
