"""The storage protocol, and the one driver that calls it in order.

A backend is a StorageWriter and a StorageReader: plans in, bytes out. It knows nothing of ranks'
state dicts (the planner answers for them) nor of commits (the driver's caller makes them).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.local import disk_name, fsync_folder, write_atomic
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, ChecksumColumns, make_tables
from dist_checkpointing.format.claims import (
    Backing,
    Claim,
    claim_of,
    meets_many,
    require_backing,
    size_of_files,
)
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import INDEX_NAME, Index, read_index, write_index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    MetadataIndex,
    SavePlan,
    SavePlanner,
)
from dist_checkpointing.planning.gc_pause import paused_collector
from dist_checkpointing.planning.layout import Layout, RowBlockLayout
from dist_checkpointing.planning.packing import pack, unpack
from dist_checkpointing.planning.plan_save import PlannedSave
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import concatenate
from dist_checkpointing.storage.options import Durability, StorageOptions

T = TypeVar("T")


def _ignore(num_bytes: int) -> None:
    """Report to nobody."""


def unreported(writer: StorageWriter) -> StorageWriter:
    """A writer that does the same, and reports to nobody."""
    writer = copy.copy(writer)
    writer.report = _ignore
    return writer


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a writer did with one item.

    Attributes:
        index: of the item.
        size_in_bytes: bytes stored.
        storage_data: for the writer's own ``finish``.
        checksum: of the item's values, see ``checksums``; None for none.
        files: that the writer made for the item, with their final sizes. What is not reported here
            rank 0 looks for itself before the commit.
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: object = None
    checksum: int | None = None
    files: tuple[SealedFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written.

    Attributes:
        noted: results with something for the writer's ``finish``.
        rows: table of the parts and objects that have a checksum, packed.
        digests: their checksums, 8 bytes each.
        files: files that the rank has made.
    """

    noted: tuple[WriteResult, ...]
    rows: bytes
    digests: bytes
    files: tuple[SealedFile, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """What rank 0 knows of a save whose data is complete; empty on the other ranks.

    Attributes:
        files: files that the ranks have reported, the tables of checksums included.
        tables: name of each table of checksums -> first and last key in it.
    """

    files: tuple[SealedFile, ...] = ()
    tables: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a stored chunk is.

    Attributes:
        file: relative to the checkpoint; None if it lies among what describes the checkpoint.
        num_bytes: that it takes there.
        is_read_whole: whatever is wanted of it, because it is compressed or very small.
    """

    file: str | None
    num_bytes: int
    is_read_whole: bool = False


class StorageWriter(ABC):
    """Writes one checkpoint; one object a rank.

    Call order: ``set_up_storage_writer``, ``prepare_local_plan``, ``prepare_global_plan`` (rank 0,
    and only if overridden), ``write_data``, ``finish`` (rank 0). Nothing is called before the
    folder is claimed, and ``finish`` only after every rank has written.

    Attributes:
        layout: how this format wants tensors cut up.
        gathers_results: whether ``finish`` needs the results that have ``storage_data`` from all
            ranks; else it gets those of rank 0.
        options: knobs of the I/O.
        report: to be called with the number of bytes that have been written since the last call.
    """

    layout: Layout = RowBlockLayout()
    gathers_results: ClassVar[bool] = False

    def __init__(self, checkpoint_dir: Path) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.options = StorageOptions()
        self.report: Callable[[int], None] = _ignore

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

    def set_up_storage_writer(self, *, rank: int, world_size: int) -> None:  # noqa: B027 - a hook
        """Get ready on every rank; rank 0 is the coordinator."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Change this rank's plan."""
        return plan

    def prepare_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """Change the plans of all ranks, on rank 0: list in, list of the same length out."""
        return list(plans)

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every item of the plan, durably; ask ``planner.get_data`` for each when needed.

        The first results are those of the plan's items, in their order; more may follow.
        """

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
        """Write, on rank 0, what describes the checkpoint as a whole, durably."""
        del results
        write_index(metadata, self.checkpoint_dir, self.options.durability)


class StorageReader(ABC):
    """Reads one checkpoint; one object a rank.

    Call order: ``read_metadata`` (rank 0), ``set_up_storage_reader``, ``prepare_local_plan``,
    ``prepare_global_plan`` (rank 0, and only if overridden), ``read_data``.

    Attributes:
        options: knobs of the I/O.
        trusted: whether objects may be unpickled without an allow-list.
        is_kept: whether many reads of single parts follow each other, from several threads, so that
            it pays to remember where parts are.
        report: to be called with the number of bytes that have been read since the last call.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.options = StorageOptions()
        self.trusted = False
        self.is_kept = False
        self.report: Callable[[int], None] = _ignore

    def location(self, chunk: MetadataIndex) -> str:
        """Where a stored chunk is, for messages."""
        return f"{self.checkpoint_dir}: {chunk.fqn} at {chunk.offset}"

    def places(self, chunks: Sequence[MetadataIndex]) -> list[ChunkPlace | None]:
        """Where stored chunks are, for forecasts; None if that is not known."""
        return [None] * len(chunks)

    def read_metadata(self) -> Index:
        """What the checkpoint holds.

        Raises:
            CorruptCheckpointError: if that cannot be found out.
        """
        index = read_index(self.checkpoint_dir)
        if index is None:
            path = str(self.checkpoint_dir / INDEX_NAME)
            raise CorruptCheckpointError(
                "the checkpoint has no index", [Finding("missing", path=path)]
            )
        return index

    def describing_names(self, wanted: Iterable[str]) -> Iterable[str]:
        """Relative names of the files that say what the checkpoint holds and where.

        Args:
            wanted: keys of tensors; files that describe one tensor only are named for these.
        """
        del wanted
        return [INDEX_NAME]

    def object_bytes(self, key: str, cell: Ints) -> bytes:
        """The stored bytes of a cell of a sharded object, called after ``set_up_storage_reader``.

        Raises:
            CorruptCheckpointError: if they are not there.
        """
        raise NotImplementedError(f"{type(self).__name__} has no objects: {key} {cell}")

    def require_stored(self, claims: Sequence[Claim], index: Index) -> None:
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
        num_bytes, _ = size_of_files(self.checkpoint_dir)
        # Every part takes a byte at least, if only to be named.
        require_backing(
            claims, lambda claim: Backing(num_bytes, num_bytes, self.claimed_in(claim.key))
        )

    def claimed_in(self, key: str) -> str:
        """The file that says what a tensor is."""
        del key
        return str(self.checkpoint_dir / INDEX_NAME)

    def set_up_storage_reader(  # noqa: B027 - a hook
        self, metadata: Index, *, rank: int, world_size: int
    ) -> None:
        """Get ready on every rank; rank 0 is the coordinator."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Change this rank's plan."""
        return plan

    def prepare_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """Change the plans of all ranks, on rank 0: list in, list of the same length out."""
        return list(plans)

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every item of the plan.

        For each item either write into ``planner.acquire_tensor(item)`` or hand a tensor to
        ``planner.apply_tensor``.
        """


def done(value: T) -> Future[T]:
    """A future that already has its result, for storage that works in the calling thread."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def write(
    planned: PlannedSave, writer: StorageWriter, comm: Comm, files: Sequence[SealedFile] = ()
) -> Finished:
    """Drive a writer through a planned save. Collective; every rank raises alike.

    Durable when it returns, but not committed.

    Args:
        planned: the save.
        writer: of this rank.
        comm: the ranks that save together.
        files: what this rank has written besides.
    """
    plan = prepare_write(planned, writer, comm)
    with comm.agreed("writing"):
        written = write_plan(plan, planned.planner, writer, comm.rank)
    written = replace(written, files=(*written.files, *files))
    return finish_write(planned, written, writer, comm)


def prepare_write(planned: PlannedSave, writer: StorageWriter, comm: Comm) -> SavePlan:
    """Let the writer change what it will write; this rank's plan. Collective."""
    with comm.agreed("preparing to write"):
        writer.set_up_storage_writer(rank=comm.rank, world_size=comm.world_size)
        plan = writer.prepare_local_plan(planned.plan)
    if type(writer).prepare_global_plan is not StorageWriter.prepare_global_plan:
        plans = comm.all_gather(plan)
        plan = comm.from_rank0("preparing to write", lambda: writer.prepare_global_plan(plans))[
            comm.rank
        ]
    return plan


def finish_write(
    planned: PlannedSave, written: Written, writer: StorageWriter, comm: Comm
) -> Finished:
    """Write what describes the whole, once every rank has written its own. Collective."""
    if not writer.gathers_results and comm.rank != 0:
        written = replace(written, noted=())
    of_ranks = comm.all_gather(written)
    with comm.agreed("finishing the write"):
        return finish_all(planned.index, of_ranks, writer) if comm.rank == 0 else Finished()


def finish_all(index: Index, of_ranks: Sequence[Written], writer: StorageWriter) -> Finished:
    """Write what describes the whole, on rank 0. Durable when it returns."""
    writer.finish(index, [w.noted for w in (of_ranks if writer.gathers_results else of_ranks[:1])])
    files = [file for written in of_ranks for file in written.files]
    tables = {}
    if any(written.rows for written in of_ranks):
        tables = _write_tables(of_ranks, writer, files)
    return Finished(tuple(files), tables)


def _write_tables(
    of_ranks: Sequence[Written], writer: StorageWriter, files: list[SealedFile]
) -> dict[str, tuple[str, str]]:
    """Write the checksums of all ranks, sorted by key."""
    rows, position = [], 0
    for rank, written in enumerate(of_ranks):
        if written.rows:
            table = unpack(written.rows, rank)
            sources = np.arange(position, position + len(table), dtype=np.int32)
            rows.append(replace(table, sources=sources))
            position += len(table)
    catalog = concatenate(rows)
    digests = np.frombuffer(b"".join(w.digests for w in of_ranks), dtype="<u8")
    folder, durability = writer.checkpoint_dir, writer.options.durability
    (folder / CHECKSUMS_NAME).mkdir(parents=True, exist_ok=True)
    tables = {}
    columns = ChecksumColumns(
        catalog.names,
        catalog.keys,
        catalog.ranks,
        catalog.ndim,
        catalog.is_object,
        catalog.offsets,
        catalog.shapes,
        catalog.flat,
        digests[catalog.sources],
    )
    for table_file in make_tables(columns):
        write_atomic(folder / table_file.name, table_file.data, durability)
        files.append(SealedFile.of_bytes(table_file.name, table_file.data))
        tables[table_file.name] = (table_file.first_key, table_file.last_key)
    if durability is Durability.FSYNC:
        fsync_folder((folder / CHECKSUMS_NAME).parent)
    return tables


def write_plan(plan: SavePlan, planner: SavePlanner, writer: StorageWriter, rank: int) -> Written:
    """Write what one rank has to write, durably. Not collective."""
    results = writer.write_data(plan, planner).result()
    checked = [
        (row, result.checksum)
        for row, result in enumerate(results[: len(plan.table)])
        if result.checksum is not None
    ]
    rows, digests = b"", b""
    if checked:
        kept = plan.table.take(np.array([row for row, _ in checked], dtype=np.int64))
        rows = pack(replace(kept, ranks=np.full(len(kept), rank, dtype=np.int32)))
        digests = np.array([digest for _, digest in checked], dtype="<u8").tobytes()
    noted = tuple(
        replace(result, files=()) for result in results if result.storage_data is not None
    )
    # Several items may share a file: the last size counts, which is the largest.
    files: dict[str, SealedFile] = {}
    for result in results:
        for file in result.files:
            known = files.get(file.name)
            if known is None or known.num_bytes <= file.num_bytes:
                files[file.name] = file
    return Written(noted, rows, digests, tuple(files.values()))


def read(
    leaves: Leaves, index: Index, planner: LoadPlanner, reader: StorageReader, comm: Comm
) -> None:
    """Plan a load and drive a reader through it. Collective; every rank raises alike.

    All that is missing is found before the first byte is read.
    """
    with comm.agreed("planning the load"), paused_collector():
        crowded = {
            leaf.key: claim_of(index[leaf.key])
            for leaf in leaves.values()
            if isinstance(leaf, ShardedTensor)
            and leaf.key in index
            and meets_many(index[leaf.key], leaf.box)
        }
        reader.require_stored(list(crowded.values()), index)
        planner.configure_planner(leaves, index, is_coordinator=comm.rank == 0, rank=comm.rank)
        plan = planner.build_local_plan()
    if type(planner).build_global_plan is not LoadPlanner.build_global_plan:
        plans = comm.all_gather(plan)
        with comm.agreed("planning the load"):
            plan = planner.build_global_plan(plans)[comm.rank]
    with comm.agreed("preparing to read"):
        plan = planner.finalize_plan(plan)
        reader.set_up_storage_reader(index, rank=comm.rank, world_size=comm.world_size)
        plan = reader.prepare_local_plan(plan)
    if type(reader).prepare_global_plan is not StorageReader.prepare_global_plan:
        read_plans = comm.all_gather(plan)
        plan = comm.from_rank0("preparing to read", lambda: reader.prepare_global_plan(read_plans))[
            comm.rank
        ]
    with comm.agreed("reading"):
        reader.read_data(plan, planner).result()
