"""The storage protocol, and the one driver that calls it in order.

A backend is a StorageWriter and a StorageReader: plans in, bytes out. It knows nothing of ranks'
state dicts (the planner answers for them) nor of commits (the driver's caller makes them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import CHECKSUMS_NAME, ChecksumColumns, make_tables
from dist_checkpointing.format.index import Index, StatedSize, meets_many, stated_size
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.planning import (
    DefaultLoadPlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
)
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import PackedTable, ShardTable, concatenate, pack
from dist_checkpointing.planning.user_planner import adapted, call_hook, placed
from dist_checkpointing.storage.fingerprints import SummingPlanner, with_fingerprints
from dist_checkpointing.storage.interface import (
    StorageReader,
    StorageWriter,
    WriteResult,
    WriteResults,
    result_of,
    results_for_finish,
    set_up_reader,
    set_up_writer,
)
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.threads import paused_collector


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written.

    ``table`` has the parts and objects that have a checksum, numbered from 0 by its ``sources``;
    it is packed where it travels. ``checksums`` are 8 bytes each, and so are ``high_digests``, the
    upper halves of the 128-bit digests, if they are known. ``writer_results`` are for the writer's
    ``finish``. ``save`` is a number, if ranks may mistake one save for another.
    """

    writer_results: tuple[WriteResult, ...] = ()
    table: ShardTable | bytes | None = None
    checksums: bytes = b""
    high_digests: bytes = b""
    fingerprint_sums: bytes = b""
    files: tuple[SealedFile, ...] = ()
    save: int = 0

    def packed(self) -> Written:
        """The same, to be sent to another rank."""
        return replace(self, table=pack(self.table)) if isinstance(self.table, ShardTable) else self


Finished = tuple[Sequence[SealedFile], Mapping[str, tuple[str, str]]]
"""What rank 0 knows of a save whose data is complete: all files that the ranks have reported, and
the name of each table of checksums with the first and the last key in it."""

_PREPARING: Final = "preparing to read"
PlanReader = Callable[[LoadPlan, LoadPlanner, StorageReader, Index, Comm], None]
"""``read_plan``, or what has the same effect when all ranks call it."""


def prepare_write(plan: SavePlan, writer: StorageWriter, comm: Comm) -> SavePlan:
    """Let the writer change this rank's plan, and return that.

    Collective if the writer changes the plans of all ranks together; otherwise each rank may fail
    alone. So it is the first thing that a rank does in a step that ends in an agreement.
    """

    def plan_of_rank() -> SavePlan:
        set_up_writer(writer, rank=comm.rank, world_size=comm.world_size)
        # A copy, because a plan may be used again by the next save.
        return writer.prepare_local_plan(replace(plan)).for_index(plan.index)

    if type(writer).prepare_global_plan is StorageWriter.prepare_global_plan:
        return plan_of_rank()
    plans = comm.exchange("preparing to write", plan_of_rank)
    prepared = comm.from_rank0("preparing to write", lambda: writer.prepare_global_plan(plans))
    return prepared[comm.rank].for_index(plan.index)


def gather_written(
    write_local: Callable[[], Written], writer: StorageWriter, comm: Comm
) -> list[Written]:
    """What every rank has written, on rank 0, as far as ``finish_all`` needs it. Collective.

    ``write_local`` writes what this rank has to write, or fails: every rank raises alike.
    """

    def result_of_rank() -> Written:
        written = write_local()
        if comm.rank and not writer.gathers_results:
            written = replace(written, writer_results=())
        return written if comm.world_size == 1 else written.packed()

    if writer.is_opaque:
        return comm.exchange("writing", result_of_rank, lambda written: written.save)
    return comm.to_rank0("writing", result_of_rank)


def finish_all(index: Index, of_ranks: Sequence[Written], writer: StorageWriter) -> Finished:
    """Write what describes the whole, on rank 0.

    Durable but for names in the folder itself and in ``.dckpt``, which a commit makes durable.
    """
    if writer.takes_fingerprints:
        index = with_fingerprints(index, [written.fingerprint_sums for written in of_ranks])
    asked = of_ranks if writer.gathers_results else of_ranks[:1]
    results = [list(written.writer_results) for written in asked]
    files = [*(writer.finish(Metadata.from_index(index), results) or ())]
    for written in of_ranks:
        files += written.files
    return files, _write_tables(of_ranks, writer, files)


def finish(
    write_local: Callable[[], Written], index: Index, writer: StorageWriter, comm: Comm
) -> None:
    """Write everything, with what describes the whole, durably, without a commit. Collective."""
    of_ranks = gather_written(write_local, writer, comm)
    with comm.agreed("finishing the write"):
        if comm.rank == 0:
            files, _ = finish_all(index, of_ranks, writer)
            if writer.options.durability is Durability.FSYNC:
                folder = writer.checkpoint_dir
                location.fsync_folders([file.name for file in files], folder, to_root=True)


def _write_tables(
    of_ranks: Sequence[Written], writer: StorageWriter, files: list[SealedFile]
) -> dict[str, tuple[str, str]]:
    """Write the checksums of all ranks, sorted by key; add to ``files``."""
    tables_of_ranks = [
        PackedTable(written.table, rank) if isinstance(written.table, bytes) else written.table
        for rank, written in enumerate(of_ranks)
        if written.table is not None
    ]
    if not tables_of_ranks:
        return {}
    catalog = concatenate(tables_of_ranks)
    checksums = np.frombuffer(b"".join(written.checksums for written in of_ranks), dtype="<u8")
    high = np.frombuffer(b"".join(written.high_digests for written in of_ranks), dtype="<u8")
    starts = np.cumsum([0, *(len(written.checksums) // 8 for written in of_ranks)])
    rows = starts[catalog.ranks] + catalog.sources
    columns = ChecksumColumns(
        catalog.names,
        catalog.keys,
        catalog.ranks,
        catalog.ndim,
        catalog.is_object,
        catalog.offsets,
        catalog.shapes,
        catalog.flat,
        checksums[rows],
    )
    folder, durability = writer.checkpoint_dir, writer.options.durability
    tables = {}
    uppers = high[rows] if len(high) == len(checksums) else None
    for contents, keys in make_tables(columns, uppers):
        for name, data in contents.items():
            files.append(SealedFile.put(folder, name, data, durability))
        tables[next(iter(contents))] = keys
    if durability is Durability.FSYNC:
        location.fsync_folder(folder / CHECKSUMS_NAME)
    return tables


def write_plan(plan: SavePlan, planner: SavePlanner, writer: StorageWriter, rank: int) -> Written:
    """Write what one rank has to write, durably. Not collective."""
    summing = SummingPlanner(planner, plan) if writer.takes_fingerprints else None
    given = result_of(writer.write_data(plan, summing or planner))
    for_finish: tuple[WriteResult, ...] = ()
    if not isinstance(given, WriteResults):
        results, for_finish = WriteResults.of(given, plan), results_for_finish(given, plan)
    elif (results := given).storage_data is not None:
        for_finish = (results.rest,)
    rows, table, checksums, high = results.checked_rows, None, b"", b""
    if results.checksums is not None and len(rows):
        ranks, sources = np.full(len(rows), rank, np.int32), np.arange(len(rows), dtype=np.int32)
        table = replace(plan.table.take(rows), ranks=ranks, sources=sources, holders=None)
        checksums = results.checksums[rows].astype("<u8").tobytes()
        if results.uppers is not None:
            high = results.uppers[rows].astype("<u8").tobytes()
    sums = b"" if summing is None else summing.packed()
    # Several items may share a file.
    return Written(for_finish, table, checksums, high, sums, tuple(dict.fromkeys(results.files)))


def read_plan(
    plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, index: Index, comm: Comm
) -> None:
    """Read the plans of all ranks, each rank its own. Collective."""
    with comm.agreed(_PREPARING):
        plan = prepare_read(plan, reader, index, comm)
    _read_prepared(plan, planner, reader, comm)


def _read_prepared(plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, comm: Comm) -> None:
    if type(reader).prepare_global_plan is not StorageReader.prepare_global_plan:
        plans = comm.all_gather(plan)
        prepared = comm.from_rank0(_PREPARING, lambda: reader.prepare_global_plan(plans))
        plan = prepared[comm.rank]
    with comm.agreed("reading"):
        result_of(reader.read_data(plan, planner))


def prepare_read(plan: LoadPlan, reader: StorageReader, index: Index, comm: Comm) -> LoadPlan:
    """Let the reader get ready and change this rank's plan, and return that. Not collective."""
    if comm.rank and isinstance(index, Metadata):
        index = reader.read_metadata()  # of which such a reader may remember more
    set_up_reader(reader, index, rank=comm.rank, world_size=comm.world_size)
    return reader.prepare_local_plan(plan)


def _crowded(wanted: WantedTable, index: Index) -> list[StatedSize]:
    """Claims of the tensors with very many chunks in one leaf."""
    keys, shapes = wanted.keys, wanted.local_shapes
    if (index.rows_of(keys) >= 0).all():
        _, chunks = index.shapes_of(keys)
    else:
        chunks = list(map(index.chunk_shape, keys))
    # Most are wanted as they are stored.
    crowded = {
        leaf.key
        for leaf, chunk, shape in zip(wanted.tensors, chunks, shapes, strict=True)
        if chunk is not None and tuple(chunk) != shape and meets_many(index[leaf.key], leaf.box)
    }
    return [stated_size(index[key]) for key in crowded]


def read(
    leaves: Leaves | WantedTable,
    index: Index,
    planner: LoadPlanner | None,
    reader: StorageReader,
    comm: Comm,
    plan_reader: PlanReader = read_plan,
) -> None:
    """Plan a load and drive a reader through it. Collective; every rank raises alike.

    All that is missing is found before the first byte is read. All ``leaves`` have memory to fill;
    without a ``planner`` it is a DefaultLoadPlanner; ``plan_reader`` reads what is planned.
    """
    wanted = leaves if isinstance(leaves, WantedTable) else WantedTable(leaves)
    with comm.agreed("planning the load"), paused_collector():
        reader.require_stored(_crowded(wanted, index), index)
        given: tuple[Any, Index] = (wanted, index)
        if planner is None:
            planner = DefaultLoadPlanner()
        else:
            planner = adapted(planner, LoadPlanner)
            # A planner of a user may do with them what one does with a dict.
            given = (dict(wanted.leaves), Metadata.from_index(index))
        call_hook(planner.configure_planner, *given, is_coordinator=comm.rank == 0, rank=comm.rank)
        plan = planner.build_local_plan()
        is_global = type(planner).build_global_plan is not LoadPlanner.build_global_plan
        if not is_global:
            plan = placed(planner.finalize_plan(plan), index, wanted.rows)
        # So that ranks wait for each other once and not twice.
        is_prepared = plan_reader is read_plan and not is_global
        if is_prepared:
            plan = prepare_read(plan, reader, index, comm)
    if is_prepared:
        _read_prepared(plan, planner, reader, comm)
        return
    if is_global:
        plans = [replace(own) for own in comm.all_gather(plan)]
        with comm.agreed("planning the load"):
            plan = planner.finalize_plan(planner.build_global_plan(plans)[comm.rank])
            plan = placed(plan, index, wanted.rows)
    plan_reader(plan, planner, reader, index, comm)
