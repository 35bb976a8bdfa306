"""StorageWriter and StorageReader, which a backend implements; WriteResult, which a writer of a
third party may return in place of a part table.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.ranged_reads import FolderReads, reads_below
from dist_checkpointing.format.checksums import CHECKSUMS_NAME
from dist_checkpointing.format.file_names import disk_name
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import (
    INDEX_NAME,
    Index,
    StatedSize,
    StoredTensor,
    read_index,
    require_backing,
    size_of_files,
    write_index,
)
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    SavePlanner,
)
from dist_checkpointing.planning.chunking import Layout, RowBlockLayout
from dist_checkpointing.planning.shard_table import Bools, Int64s, ShardTable
from dist_checkpointing.planning.user_planner import call_hook
from dist_checkpointing.storage.options import StorageOptions


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a writer did with one item.

    Attributes:
        index: Index of the item. ``finish`` gets the index by which a reader asks for the stored
            chunk.
        size_in_bytes: Bytes stored.
        storage_data: Data for the writer's own ``finish``.
        checksum: Checksum of the item's values, see ``checksums``; None for none.
        files: Files that the writer made for the item, with their final sizes. In folders of which
            no file is reported rank 0 looks for itself before the commit.
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: object = None
    checksum: int | None = None
    files: tuple[SealedFile, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class WriteResults:
    """What a writer did with all rows of a plan, as columns.

    It iterates over a result for each row, in order, and one more behind them if there are
    ``storage_data`` or ``files``.

    Attributes:
        table: The rows.
        num_bytes: ``[rows]``, bytes stored.
        checksums: ``[rows]`` as uint64, see ``WriteResult``; None if no row has one.
        checked: ``[rows]``, which rows have a checksum; None if all have.
        files: Files that the writer made, with their final sizes.
        storage_data: For the writer's own ``finish``, about all rows together.
        uppers: ``[rows]`` as uint64, the upper halves of the 128-bit digests whose lower halves are
            the checksums; None if the writer does not know them.
    """

    table: ShardTable
    num_bytes: Int64s
    checksums: npt.NDArray[np.uint64] | None = None
    checked: Bools | None = None
    files: tuple[SealedFile, ...] = ()
    storage_data: object = None
    uppers: npt.NDArray[np.uint64] | None = None

    @classmethod
    def of(cls, results: Sequence[WriteResult], plan: SavePlan) -> WriteResults:
        """The columns of a list of results, the first of which are those of the plan's items."""
        rows = results[: len(plan.table)]
        return cls(
            plan.table,
            np.array([result.size_in_bytes for result in rows], dtype=np.int64),
            np.array([result.checksum or 0 for result in rows], dtype=np.uint64),
            np.array([result.checksum is not None for result in rows], dtype=np.bool_),
            tuple(itertools.chain.from_iterable(result.files for result in results)),
        )

    @property
    def checked_rows(self) -> Int64s:
        if self.checksums is None:
            return np.empty(0, dtype=np.int64)
        return np.arange(len(self.table)) if self.checked is None else np.flatnonzero(self.checked)

    def __iter__(self) -> Iterator[WriteResult]:
        table, checksums = self.table, dict[int, int]()
        if self.checksums is not None:
            rows = self.checked_rows
            checksums = dict(zip(rows.tolist(), self.checksums[rows].tolist(), strict=True))
        for row, num_bytes in enumerate(self.num_bytes.tolist()):
            index = MetadataIndex(table.key(row), table.box(row).offset, int(table.sources[row]))
            yield WriteResult(index, num_bytes, None, checksums.get(row))
        if self.storage_data is not None or self.files:
            yield replace(self.rest, files=self.files)

    @property
    def rest(self) -> WriteResult:
        """What ``finish`` gets."""
        return WriteResult(MetadataIndex(""), int(self.num_bytes.sum()), self.storage_data)


def results_for_finish(results: Sequence[WriteResult], plan: SavePlan) -> tuple[WriteResult, ...]:
    """The results of the items of a plan, each under the index by which a reader asks for it."""
    table, pieces = plan.table, {} if plan.index is None else plan.index.pieces
    numbers = {
        key: {piece: number for number, piece in enumerate(pieces[key])}
        for key in set(table.key_column)
        if key in pieces
    }
    # Parts of one flattened range have the same index in a plan, and different ones as stored.
    stored: dict[MetadataIndex, deque[MetadataIndex]] = defaultdict(deque)
    for row, item in enumerate(plan.items if results else ()):
        key, box = table.key(row), table.box(row)
        number = numbers.get(key, {}).get((box, table.flat_range(row)))
        stored[item.index].append(MetadataIndex(key, box.offset, number))

    def stored_index(result: WriteResult) -> MetadataIndex:
        known = stored.get(result.index)
        return known.popleft() if known else result.index

    return tuple(replace(result, index=stored_index(result), files=()) for result in results)


T = TypeVar("T")
Plan = TypeVar("Plan")
_UNKNOWN = Path()
"""The folder of a writer or a reader before its strategy sets it."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a stored chunk is.

    Attributes:
        file: File, relative to the checkpoint; None if it lies among what describes the checkpoint.
        num_bytes: Bytes that it takes there.
        is_read_whole: Whether all of it is read whatever is wanted, because it is compressed or
            very small.
    """

    file: str | None
    num_bytes: int
    is_read_whole: bool = False


class Storage(ABC, Generic[Plan]):
    """What a StorageWriter and a StorageReader have in common."""

    report: Callable[[int], None] = staticmethod(lambda _: None)

    def __init__(self, checkpoint_dir: Any = _UNKNOWN) -> None:
        self.checkpoint_dir: Path = checkpoint_dir

    @cached_property
    def options(self) -> StorageOptions:
        """Knobs of the I/O."""
        return StorageOptions()

    def reset(self, checkpoint_id: Any) -> None:
        """Learn the folder of the checkpoint, before anything else is called."""

    def prepare_local_plan(self, plan: Plan) -> Plan:
        """Change this rank's plan."""
        return plan

    def prepare_global_plan(self, plans: Sequence[Plan]) -> list[Plan]:
        """Change the plans of all ranks, on rank 0: list in, list of the same length out."""
        return list(plans)


class StorageWriter(Storage[SavePlan]):
    """Writes one checkpoint; one object a rank.

    Call order: ``reset``, ``set_up_storage_writer``, ``prepare_local_plan``,
    ``prepare_global_plan`` (rank 0, and only if overridden), ``write_data``, ``finish`` (rank 0).
    What follows ``reset`` is called when the folder is claimed, and ``finish`` only after every
    rank has written.

    Attributes:
        layout: How this format wants tensors cut up. By default every stored part is a box.
        gathers_results: Whether ``finish`` needs the results of all ranks, as a list for each rank
            in rank order; else it gets those of rank 0 only. Of WriteResults it gets ``rest``.
        keeps_cuts: Whether the parts of a tensor stay apart; else its values lie in one run.
        keeps_fingerprints: Whether the index that ``finish`` gets is kept with all that it says.
        shares_files: Whether it can share files of a base. Such a writer makes a checkpoint that
            is whole without the base, and reports 128-bit digests.
        uses_object_stores: Whether ``checkpoint_dir`` may be an ObjectPath: the writer then goes
            through ``filesystem.location`` and ``filesystem.file_writer``.
        casts: Whether it casts what a planner gives to the dtype of the index, block by block.
        is_opaque: Whether it neither names nor reports what it writes, so that everything in the
            folder is sealed. ``write_data`` may talk to the other ranks, which are all there.
        finalize_fns: Functions to call on every rank, in order, when all ranks have written.
        takes_fingerprints: Whether the values are summed as they are written.
        report: Function to call with the number of bytes that have been written since the last
            call.
        base: Folder of a checkpoint of the same format, whose files may be shared where they hold
            what this save would write; None for none.
        attempt: Name of this save, see ``format.seal.shared_name``; "" if nobody commits it.
        commit_file: Name and content of the file that makes the folder one of another program,
            instead of ``metadata.json``; set by ``finish``. Without a content, the file of this
            name is all that is saved, and takes the place of the folder.
        is_one_file: Whether the path of the checkpoint is that of a file.
        rank: This rank.
        world_size: Number of ranks that write.
    """

    layout: Layout = RowBlockLayout(keeps_ranges=False)
    gathers_results: ClassVar[bool] = True
    keeps_cuts: ClassVar[bool] = True
    keeps_fingerprints: ClassVar[bool] = True
    shares_files: ClassVar[bool] = False
    uses_object_stores: ClassVar[bool] = False
    casts: ClassVar[bool] = False
    is_opaque: ClassVar[bool] = False
    finalize_fns: Sequence[Callable[[], None]] = ()
    takes_fingerprints: bool = False
    base: Path | None = None
    attempt: str = ""
    commit_file: tuple[str, bytes | None] | None = None
    is_one_file: bool = False
    rank: int = 0
    world_size: int = 1

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        """Relative names of all files and folders that the writers of all ranks will create.

        Args:
            index: what the checkpoint will hold.
            world_size: number of ranks that write.

        Raises:
            InvalidShardingError: if a key cannot be stored.
        """
        del world_size
        return [INDEX_NAME, CHECKSUMS_NAME, *(disk_name(key) for key in index)]

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Get ready on every rank.

        Args:
            args: nothing.
            kwargs: those that the method has names for, or all if it takes any keyword, of
                ``is_coordinator`` (whether this is rank 0), ``rank`` and ``world_size``.
        """
        del args
        self.rank, self.world_size = kwargs.get("rank", 0), kwargs.get("world_size", 1)

    @abstractmethod
    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]] | Future[WriteResults] | torch.futures.Future[Any]:
        """Write every item of the plan, durably; ask for the data of each when it is needed.

        A writer may work on ``plan.items`` with ``planner.get_data`` or ``resolve_data``, or, for
        many small tensors, on the rows of ``plan.table`` with ``planner.data_of(plan)``.

        The first results are those of the plan's items, in their order; more may follow.
        """

    def finish(
        self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]
    ) -> Sequence[SealedFile] | None:
        """Write, on rank 0, what describes the checkpoint as a whole, durably.

        Args:
            metadata: what the checkpoint will hold; it is an Index too.
            results: of each rank, see ``gathers_results``.

        Returns:
            Files that no rank has reported. In an object store it must be all of them.
        """
        del results
        return [write_index(metadata, self.checkpoint_dir, self.options.durability)]


class StorageReader(Storage[LoadPlan]):
    """Reads one checkpoint; one object a rank.

    Call order: ``reset``, ``read_metadata`` (rank 0, which sends an Index to all; every rank, if it
    gives a Metadata), ``set_up_storage_reader``, ``prepare_local_plan``, ``prepare_global_plan``
    (rank 0, and only if overridden), ``read_data``.

    Attributes:
        trusted: Whether objects may be unpickled without an allow-list.
        is_kept: Whether many reads of single parts follow each other, from several threads, so that
            it pays to remember where parts are.
        growth: How many times larger values may be than their files, if those are compressed.
        has_checksums: Whether the format has any. If not, ``read_metadata`` compares the sizes of
            the files with what is in them.
        report: Function to call with the number of bytes that have been read since the last call.
    """

    trusted: bool = False
    is_kept: bool = False
    growth: ClassVar[int] = 1
    has_checksums: ClassVar[bool] = True
    _index: Index = Index.of([])

    @cached_property
    def files(self) -> FolderReads:
        """Reads the files of the checkpoint."""
        options = self.options
        return reads_below(
            self.checkpoint_dir, options.threads, options.buffer_bytes, options.maps_files
        )

    def location(self, chunk: MetadataIndex) -> str:
        """Where a stored chunk is, for messages."""
        return f"{self.checkpoint_dir}: {chunk.fqn} at {chunk.offset}"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        """Where stored chunks and cells of objects are; None if that is not known."""
        return [None] * len(chunks)

    def read_metadata(self) -> Index:
        """What the checkpoint holds: an Index, or a Metadata, which each rank reads for itself.

        Raises:
            CorruptCheckpointError: if that cannot be found out.
        """
        index = read_index(self.checkpoint_dir)
        return self.rebuild_index() if index is None else index

    def rebuild_index(self) -> Index:
        """What the checkpoint holds, as other files say it where the index is missing."""
        finding = Finding("missing", path=str(self.checkpoint_dir / INDEX_NAME))
        raise CorruptCheckpointError("the checkpoint has no index", [finding])

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        """Relative names of the files that say what the checkpoint holds and where.

        Args:
            wanted: keys of tensors; files that describe one tensor only are named for these.
        """
        del wanted
        return [INDEX_NAME]

    def read_box(
        self, tensor: StoredTensor, box: Box, memory: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        """A box of one tensor, where that takes no plan; None, also for whatever is wrong.

        Called after ``set_up_storage_reader``, and by several threads.

        Args:
            tensor: as the index tells it.
            box: in elements of it.
            memory: makes the tensor to read into, as ``torch.empty`` does.
        """
        del tensor, box, memory
        return None

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        """The stored bytes of a cell of a sharded object, called after ``set_up_storage_reader``.

        Raises:
            CorruptCheckpointError: if they are not there.
        """
        raise NotImplementedError(f"{type(self).__name__} has no objects: {key} {cell}")

    def require_stored(self, claims: Sequence[StatedSize], index: Index) -> None:
        """Make sure that large tensors and objects are there, before they cost memory or work.

        May be called before ``set_up_storage_reader``.

        Args:
            claims: what the index says of them.
            index: it.

        Raises:
            CorruptCheckpointError: if the files cannot hold what is claimed.
        """
        del index
        if not claims:
            return
        num_bytes = self.growth * size_of_files(self.checkpoint_dir)[0]
        # Every part takes a byte at least, if only to be named.
        require_backing(claims, lambda claim: (num_bytes, num_bytes, self.claimed_in(claim.key)))

    def claimed_in(self, key: str) -> str:
        """The file that says what a tensor is, or the folder of the checkpoint."""
        return str(self.checkpoint_dir / next(iter(self.describing_names([key])), ""))

    def set_up_storage_reader(self, metadata: Any, *args: Any, **kwargs: Any) -> None:
        """Get ready on every rank.

        Args:
            metadata: what ``read_metadata`` gave, an Index or a Metadata.
            args: nothing.
            kwargs: as for ``set_up_storage_writer``.
        """
        del args, kwargs
        self._index = metadata

    @abstractmethod
    def read_data(
        self, plan: LoadPlan, planner: LoadPlanner
    ) -> Future[None] | torch.futures.Future[None]:
        """Fill every item of the plan.

        For each item either write into ``planner.acquire_tensor(item)`` or hand a tensor to
        ``planner.apply_tensor``; for an object call ``planner.apply_bytes`` with the object, or
        ``planner.load_bytes`` with a stream of ``torch.save``. For many small tensors a reader may
        work on the rows of ``plan.table`` with ``planner.destinations(plan)`` instead.
        """


def done(value: T) -> Future[T]:
    """A future that already has its result, for storage that works in the calling thread."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def result_of(future: Any) -> Any:
    """The result of a future of ``concurrent.futures`` or of torch, when it is there."""
    return future.wait() if isinstance(future, torch.futures.Future) else future.result()


def set_up_writer(writer: StorageWriter, *, rank: int, world_size: int) -> None:
    """Call ``set_up_storage_writer``, whatever of the protocol it takes."""
    call_hook(
        writer.set_up_storage_writer, is_coordinator=rank == 0, rank=rank, world_size=world_size
    )


def set_up_reader(reader: StorageReader, index: Index, *, rank: int, world_size: int) -> None:
    """Call ``set_up_storage_reader``, whatever of the protocol it takes."""
    call_hook(
        reader.set_up_storage_reader,
        # One that is more than an Index is what the reader made of its own.
        Metadata.from_index(index) if type(index) is Index else index,
        is_coordinator=rank == 0,
        rank=rank,
        world_size=world_size,
    )
