"""``save(base=...)``: which bases are possible, and what a save would write that the base holds.

A part of a plan is the same as one of the base if its key, box, dtype and 128-bit digest are. Each
rank reads the digests of the keys that it writes, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.local_folder import share_file
from dist_checkpointing.filesystem.location import require_local
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import checksums
from dist_checkpointing.format.commit import read_config
from dist_checkpointing.format.geometry import Ints, row_bytes
from dist_checkpointing.format.index import Index, read_index
from dist_checkpointing.format.leftovers import CONFIG_FNAME, is_in_attempt
from dist_checkpointing.format.seal import Seal, SealedFile, check_files, read_seal
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning.chunking import nested_grids
from dist_checkpointing.planning.shard_table import Bools, Columns, Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageReader, StorageWriter
from dist_checkpointing.storage.options import Checksum, StorageOptions
from dist_checkpointing.storage.staging import HostBlocks
from dist_checkpointing.strategies.base import PlannedSaveStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.chunk_reads import Extent, read_extent
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.strategies.selection import Selection, select_strategy
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)

_LARGE_BYTES: Final = 2**20
_HEAD_BYTES: Final = 2**12
"""Of a large part so much is compared first."""
LEAST_SHARED: Final = 0.5
"""A file is shared if at least this part of its bytes is still used, so that a checkpoint takes at
most twice its state."""


def require_sharing_strategy(selection: Selection[SaveShardedStrategy], folder: Location) -> None:
    """Refuse a strategy whose checkpoints cannot share files, and a place where files cannot."""
    require_local(folder, "an incremental save")
    strategy = select_strategy(StrategyAction.SAVE_SHARDED, selection).resolved()
    writer = strategy.make_writer(Path()) if isinstance(strategy, PlannedSaveStrategy) else None
    require_sharing(writer, f"{strategy.backend} {strategy.version}")


def require_sharing(writer: StorageWriter | None, form: str, split: str | None = None) -> None:
    """Refuse a base for a strategy that cannot share files with it, or that is not on one disk.

    ``form`` is the backend and version, for messages; ``split`` the name of a checkpoint whose
    ranks do not share a disk.
    """
    message, details = "the checkpoint cannot be incremental", dict[str, Any]()
    if split is not None:
        message = "each machine has a separate disk"
        problem = "files are shared with a base that is whole on one disk"
        details = {"path": split}
        remedy = "Save without a base, or to a disk that all ranks share."
    elif writer is None or not writer.shares_files:
        problem = "checkpoints of this format do not share files"
        details = {"expected": "the backend tensorstore or zarr", "found": form}
        remedy = "Save without a base, or with one of these backends."
    elif writer.options.checksum is Checksum.NONE:
        problem = "parts are compared by their digests, and none are made"
        remedy = "Save with StorageOptions(checksum=Checksum.XXH3)."
    else:
        return
    raise UnsupportedFormatError(message, [Finding(problem, remedy=remedy, **details)])


def base_grids(
    base: Path, folder: Location, saved: tuple[str, int], index: Index | None
) -> dict[str, Ints] | None:
    """Chunk shapes of a base that a save should take over, by key; None if its format is another.

    ``saved`` is the backend and version of the save, and ``index`` what it will hold; None if it
    cannot be cut in another way.

    Raises:
        CheckpointNotFoundError: if the base is no checkpoint.
        CheckpointingException: if it is the folder that is written.
    """
    if base.resolve() == Path(folder).resolve():
        problem, remedy = "the base is the folder of the save itself", "Save into another folder."
        finding = Finding(problem, path=str(folder), remedy=remedy)
        raise CheckpointingException("a checkpoint cannot be its own base", [finding])
    config = read_config(base)
    stored = (config.sharded_backend, config.sharded_backend_version)
    if stored != saved:
        logger.warning("nothing is shared with %s: it is of format %s, not %s", base, stored, saved)
        return None
    if index is None:
        return {}
    try:
        stored_index = read_index(base)
    except (CheckpointingException, OSError) as error:
        logger.info("the chunks of %s are not known: %s", base, error)
        return {}
    return {} if stored_index is None else nested_grids(index, stored_index)


@dataclass(frozen=True, slots=True, eq=False)
class BaseParts:
    """The base of a save, and how its parts fit the rows of a plan of one rank.

    Whether it has a part with the key, dtype and box of each row; and the digest of that,
    ``[rows, 2]``, upper half and checksum.
    """

    folder: Path
    seal: Seal
    index: Index
    same_box: Bools
    digests: checksums.Uint64s

    def is_in_place(self) -> bool:
        """Whether the base is still the same save, committed: no file of another one was shared."""
        try:
            return is_in_attempt(self.folder, self.seal.attempt) and location.is_file(
                self.folder / CONFIG_FNAME
            )
        except OSError:
            return False


def open_base(reader: StorageReader, table: ShardTable) -> BaseParts | None:
    """What a base has of the key, box and dtype of rows; None if it has no digests.

    Raises:
        CorruptCheckpointError: if the base is damaged.
        OSError: if it cannot be read.
    """
    folder = reader.checkpoint_dir
    seal = read_seal(folder)
    used = sorted({table.names[number] for number in np.unique(table.keys).tolist()})
    tables = [] if seal is None or seal.is_open else seal.tables_with(used)
    if seal is None or any(checksums.upper_name(name) not in seal.files for name in tables):
        logger.info("nothing is shared with %s, which has no 128-bit digests", folder)
        return None
    describing = [name for name in reader.describing_names(used) if name in seal.files]
    findings = check_files(seal, folder, [*describing, *tables, *map(checksums.upper_name, tables)])
    CorruptCheckpointError.raise_if(findings, "the base is damaged")
    index = reader.read_metadata()
    same_dtype = _has_same_dtype(table, index)
    same_box = np.zeros(len(table), dtype=np.bool_)
    digests = np.zeros((len(table), 2), dtype=np.uint64)
    row_of = {part: row for row, part in enumerate(_boxes(table))}
    for name in tables:
        stored, uppers = checksums.read_digests(folder, name)
        for position, part in enumerate(_boxes(stored)):
            row = row_of.get(part)
            if row is not None:
                same_box[row] = same_dtype[row]
                digests[row] = uppers[position], stored.digests[position]
    return BaseParts(folder, seal, index, same_box, digests)


def _boxes(table: ShardTable | checksums.ChecksumColumns) -> list[tuple[str, bytes]]:
    """Key and box of each row, in a form that can be compared."""
    ndim = table.ndim.astype(np.int64)
    columns = [ndim, table.is_object.astype(np.int64), *table.flat.T]
    boxes = row_bytes(columns, (table.offsets, table.shapes), ndim)
    rows = zip(table.keys.tolist(), boxes, strict=True)
    return [(table.names[key], bytes(box)) for key, box in rows]


def _has_same_dtype(table: ShardTable, index: Index) -> Bools:
    numbers, types = index.dtypes_of(table.names)
    stored = [None if (dtype := types[at]) is None else dtype.name for at in numbers.tolist()]
    is_stored_object = [name in index.objects for name in table.names]
    columns = (table.keys.tolist(), table.dtypes.tolist(), table.is_object.tolist())
    return np.array(
        [
            is_stored_object[key] if is_object else stored[key] == table.names[dtype]
            for key, dtype, is_object in zip(*columns, strict=True)
        ],
        dtype=np.bool_,
    )


class PlanDigests:
    """Digests of rows of a plan, made from the data that the planner has.

    Attributes:
        known: ``[rows]``, which are known.
        columns: ``[rows, 2]``, upper halves and checksums of those.
    """

    def __init__(
        self, table: ShardTable, data_of: Callable[[int], Any], options: StorageOptions
    ) -> None:
        self.known: Bools = np.zeros(len(table), dtype=np.bool_)
        self.columns: npt.NDArray[np.uint64] = np.zeros((len(self.known), 2), dtype=np.uint64)
        self.data_of = data_of
        self._table, self._options = table, options

    def add(self, rows: Int64s) -> None:
        is_large = self._table.num_bytes[rows] >= _LARGE_BYTES
        small, large = rows[~is_large].tolist(), rows[is_large].tolist()
        # Many small parts are work for the interpreter: threads would only take turns.
        made = [*map(self._digest, small), *in_threads(self._digest, large, self._options.threads)]
        digests = dict(zip([*small, *large], made, strict=True))
        digests.update(self._digests_of_copies([row for row in digests if digests[row] is None]))
        order = np.array(list(digests), dtype=np.int64)
        found = [digest for digest in digests.values() if digest]
        self.columns[order] = checksums.columns_of(found)
        self.known[order] = True

    def digest(self, row: int) -> bytes | None:
        """The digest of a row, if it is known."""
        return self.columns[row].astype(">u8").tobytes() if self.known[row] else None

    def begins_with(self, row: int, head: bytes) -> bool:
        """Whether a tensor begins with these bytes."""
        data: torch.Tensor = self.data_of(row)
        values = data.detach().contiguous().reshape(-1)[: len(head) // data.dtype.itemsize]
        return checksums.bytes_of(tensor_memory.as_numpy(values.cpu())) == head

    def _digest(self, row: int) -> bytes | None:
        """The digest of a row; None if its values must be copied from elsewhere first."""
        data = self.data_of(row)
        if self._table.is_object[row]:
            value = serialize(data, f"the ShardedObject {self._table.key(row)!r}")
            return checksums.digest_of(value, len(value))
        array = tensor_memory.fillable(data.detach().contiguous(), data.dtype)
        return None if array is None else checksums.digest_of(array, array.nbytes)

    def _digests_of_copies(self, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The digests of tensors on GPUs, and of those whose memory holds other values."""
        copies = HostBlocks(self._options.buffer_bytes, lambda: None).of(map(self.data_of, rows))
        for number, blocks in groupby(copies, key=itemgetter(0)):
            digest = checksums.Digest()
            for _, block in blocks:
                digest.update(checksums.bytes_of(tensor_memory.as_numpy(block.contiguous())))
            yield rows[number], digest.digest()


@dataclass(frozen=True, slots=True, eq=False)
class Candidates(Columns):
    """Rows of a plan, and parts of files of the base that may hold their values, or do.

    Attributes:
        rows: Rows of the plan.
        files: Files of the base.
        extents: ``[rows, 3]``, position in ``files``, first byte, number of bytes.
    """

    rows: Int64s
    files: tuple[SealedFile, ...]
    extents: Int64s

    def bytes_in_files(self) -> Int64s:
        return np.bincount(self.extents[:, 0], self.extents[:, 2], len(self.files)).astype(np.int64)


def share_parts(
    writer: StorageWriter,
    reader_type: type[StorageReader],
    table: ShardTable,
    digests: PlanDigests,
    candidates_in: Callable[[BaseParts], Candidates],
    *,
    is_alone: bool = True,
    reuses_names: bool = False,
) -> tuple[Candidates, Int64s]:
    """Share the files of the base, if any, that hold values of a plan. Not collective.

    Nothing is shared if the base is damaged or gone, which is logged. ``digests`` gets those of the
    rows that are needed.

    ``candidates_in`` finds the values in the base. No other rank shares the same files if this one
    ``is_alone``; files of another save may have the same names if it ``reuses_names``.

    Returns:
        The rows that lie in shared files; and those that have not changed either, but lie in files
        of which too little is used.
    """
    base, none = writer.base, np.empty(0, dtype=np.int64)
    nothing = Candidates(none, (), none.reshape(0, 3)), none
    if base is None or not len(table):
        return nothing
    linked: tuple[SealedFile, ...] = ()
    try:
        parts = open_base(reader_type(base), table)
        if parts is None:
            return nothing
        candidates = candidates_in(parts)
        same = candidates.take(_are_same(candidates, parts, table, digests, writer.options))
        sizes = np.array([file.num_bytes for file in same.files], dtype=np.int64)
        # Other ranks may use the rest of a file: what this one looks at stands for all of it.
        whole = sizes if is_alone else candidates.bytes_in_files()
        used = same.bytes_in_files()
        is_wanted = (used > 0) & (used >= LEAST_SHARED * whole)
        linked = same.files if reuses_names else ()
        numbers, files = _share_files(same.files, is_wanted, parts, writer)
        if linked and not parts.is_in_place():
            raise FileNotFoundError("it was deleted meanwhile")
    except (CheckpointingException, OSError) as error:
        logger.warning("nothing is shared with %s, which cannot be used: %s", base, error)
        for file in linked:  # their names are needed
            (writer.checkpoint_dir / file.name).unlink(missing_ok=True)
        return nothing
    number = numbers[same.extents[:, 0]]
    kept = same.take(number >= 0)
    kept.extents[:, 0] = number[number >= 0]
    writer.report(int(table.num_bytes[kept.rows].sum()))
    return replace(kept, files=files), same.rows[number < 0]


def _are_same(
    candidates: Candidates,
    base: BaseParts,
    table: ShardTable,
    digests: PlanDigests,
    options: StorageOptions,
) -> Bools:
    """Which candidates hold what the rows of the plan hold."""
    rows = candidates.rows
    sizes, itemsizes = table.num_bytes[rows], table.itemsizes[rows]

    def has_head(at: int) -> bool:
        """Whether a candidate begins like the row, as nearly all that differ do not."""
        (file, offset, length), row = candidates.extents[at].tolist(), int(rows[at])
        most = min(length, _HEAD_BYTES // int(itemsizes[at]) * int(itemsizes[at]))
        head = Extent(base.folder, candidates.files[file].name, offset, most)
        return digests.begins_with(row, read_extent(head, table.key(row)))

    # What begins otherwise need not be hashed before it is written. Padded and compressed files
    # have other sizes than their values.
    is_same = np.ones(len(rows), dtype=np.bool_)
    is_large = (sizes >= _LARGE_BYTES) & (candidates.extents[:, 2] == sizes)
    compared = np.flatnonzero(is_large).tolist()
    is_same[compared] = in_threads(has_head, compared, options.threads)
    digests.add(rows[is_same])
    is_same &= (digests.columns[rows] == base.digests[rows]).all(axis=1)
    return is_same


def _share_files(
    sealed: Sequence[SealedFile], is_wanted: Bools, base: BaseParts, writer: StorageWriter
) -> tuple[Int64s, tuple[SealedFile, ...]]:
    """Share the wanted files: the new number of each, -1 for one that is not shared, and those."""
    folder, wanted = writer.checkpoint_dir, np.flatnonzero(is_wanted).tolist()
    for parent in {(folder / sealed[number].name).parent for number in wanted}:
        parent.mkdir(parents=True, exist_ok=True)

    def share(number: int) -> int | None:
        file = sealed[number]
        target = folder / file.name
        size = share_file(base.folder / file.name, target)
        if size is not None and size != file.num_bytes:
            problem = "%s/%s is not shared: it has another size than when it was saved"
            logger.warning(problem, base.folder, file.name)
            target.unlink(missing_ok=True)
        return size

    sizes = [share(number) for number in wanted[:1]]
    if None in sizes:
        logger.warning("files of %s cannot be shared here, and are written", base.folder)
    else:
        sizes += in_threads(share, wanted[1:], writer.options.threads)
    is_shared = (sealed[n].num_bytes == size for n, size in zip(wanted, sizes, strict=False))
    shared = list(compress(wanted, is_shared))
    numbers = np.full(len(sealed), -1, dtype=np.int64)
    numbers[shared] = np.arange(len(shared))
    return numbers, tuple(sealed[number] for number in shared)
