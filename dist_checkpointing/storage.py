"""The storage protocol, and the one driver that calls it in order.

A backend is a StorageWriter and a StorageReader: plans in, bytes out. It knows nothing of ranks'
state dicts (the planner answers for them) nor of commits (the driver's caller makes them).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from dist_checkpointing.checksums import CHECKSUMS_NAME, write_checksums
from dist_checkpointing.collector import paused_collector
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.index import INDEX_NAME, Index, read_index, write_index
from dist_checkpointing.options import Durability, StorageOptions
from dist_checkpointing.planned_save import PlannedSave
from dist_checkpointing.planning import (
    LoadPlan,
    LoadPlanner,
    MetadataIndex,
    SavePlan,
    SavePlanner,
)
from dist_checkpointing.planning.layout import Layout, RowBlockLayout
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.store import disk_name, fsync_file, fsync_folders

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
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: object = None
    checksum: int | None = None


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


def write(planned: PlannedSave, writer: StorageWriter, comm: Comm) -> None:
    """Drive a writer through a planned save. Collective; every rank raises alike.

    Durable when it returns, but not committed.
    """
    plan = prepare_write(planned, writer, comm)
    with comm.agreed("writing"):
        results = write_plan(plan, planned.planner, writer, comm.rank)
    finish_write(planned, results, writer, comm)


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
    planned: PlannedSave, results: Sequence[WriteResult], writer: StorageWriter, comm: Comm
) -> None:
    """Write what describes the whole, once every rank has written its own. Collective."""
    noted = [result for result in results if result.storage_data is not None]
    all_results = comm.all_gather(noted) if writer.gathers_results else [noted]
    with comm.agreed("finishing the write"):
        if comm.rank == 0:
            writer.finish(planned.index, all_results)


def write_plan(
    plan: SavePlan, planner: SavePlanner, writer: StorageWriter, rank: int
) -> list[WriteResult]:
    """Write what one rank has to write, and its checksums, durably. Not collective."""
    results = writer.write_data(plan, planner).result()
    digests = [result.checksum for result in results[: len(plan.table)]]
    path = write_checksums(writer.checkpoint_dir, rank, plan.table, digests)
    if path is not None and writer.options.durability is Durability.FSYNC:
        fsync_file(path)
        fsync_folders([path], writer.checkpoint_dir)
    return results


def read(
    leaves: Leaves, index: Index, planner: LoadPlanner, reader: StorageReader, comm: Comm
) -> None:
    """Plan a load and drive a reader through it. Collective; every rank raises alike.

    All that is missing is found before the first byte is read.
    """
    with comm.agreed("planning the load"), paused_collector():
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
