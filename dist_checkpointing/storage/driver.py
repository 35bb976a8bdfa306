"""The storage protocol, and the one driver that calls it in order.

A backend is a StorageWriter and a StorageReader: plans in, bytes out. It knows nothing of ranks'
state dicts (the planner answers for them) nor of commits (the driver's caller makes them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.checksums import (
    CHECKSUMS_NAME,
    ChecksumColumns,
    make_tables,
    upper_file,
)
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
from dist_checkpointing.planning.load_plan import TensorColumns
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.resharding import WantedLeaves
from dist_checkpointing.planning.shard_table import Int64s, concatenate, pack, unpack
from dist_checkpointing.planning.user_planner import call_hook
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

    Attributes:
        noted: Results for the writer's ``finish``.
        rows: Table of the parts and objects that have a checksum, packed.
        digests: Their checksums, 8 bytes each.
        files: Files that the rank has made.
        save: Number of the save, if ranks may mistake one for another.
        sums: Sums of each of its tensors, packed, if fingerprints are taken.
        uppers: Upper halves of the 128-bit digests, 8 bytes each; empty if they are not known.
    """

    noted: tuple[WriteResult, ...] = ()
    rows: bytes = b""
    digests: bytes = b""
    files: tuple[SealedFile, ...] = ()
    save: int = 0
    sums: bytes = b""
    uppers: bytes = b""


PlanReader = Callable[[LoadPlan, LoadPlanner, StorageReader, Index, Comm], None]
"""``read_plan``, or what has the same effect when all ranks call it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What rank 0 knows of a save whose data is complete; empty on the other ranks.

    Attributes:
        files: Files that the ranks have reported, the tables of checksums included.
        tables: Name of each table of checksums -> first and last key in it.
    """

    files: tuple[SealedFile, ...] = ()
    tables: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def write(
    plan: SavePlan,
    index: Index,
    planner: SavePlanner,
    writer: StorageWriter,
    comm: Comm,
) -> Finished:
    """Drive a writer through a planned save. Collective; every rank raises alike.

    Durable when it returns, but not committed.

    Args:
        plan: what this rank writes.
        index: what the checkpoint will hold.
        planner: answers for the data of the plan's items.
        writer: of this rank.
        comm: the ranks that save together.
    """

    def write_own() -> Written:
        return write_plan(prepare_write(plan, writer, comm), planner, writer, comm.rank)

    of_ranks = gather_written(write_own, writer, comm)
    with comm.agreed("finishing the write"):
        return finish_durably(index, of_ranks, writer) if comm.rank == 0 else Finished()


def prepare_write(plan: SavePlan, writer: StorageWriter, comm: Comm) -> SavePlan:
    """Let the writer change this rank's plan, and return that.

    Collective if the writer changes the plans of all ranks together; otherwise each rank may fail
    alone. So it is the first thing that a rank does in a step that ends in an agreement.
    """

    def own() -> SavePlan:
        set_up_writer(writer, rank=comm.rank, world_size=comm.world_size)
        return writer.prepare_local_plan(plan).for_index(plan.index)

    if type(writer).prepare_global_plan is StorageWriter.prepare_global_plan:
        return own()
    plans = comm.exchange("preparing to write", own)
    prepared = comm.from_rank0("preparing to write", lambda: writer.prepare_global_plan(plans))
    return prepared[comm.rank].for_index(plan.index)


def gather_written(
    write_own: Callable[[], Written], writer: StorageWriter, comm: Comm
) -> list[Written]:
    """What every rank has written, on rank 0, as far as ``finish_all`` needs it. Collective.

    Args:
        write_own: writes what this rank has to write, or fails. Every rank raises alike.
        writer: of this rank.
        comm: the ranks that save together.
    """

    def told() -> Written:
        written = write_own()
        if not writer.gathers_results and comm.rank != 0:
            written = replace(written, noted=())
        return written

    return comm.to_rank0("writing", told)


def finish_all(index: Index, of_ranks: Sequence[Written], writer: StorageWriter) -> Finished:
    """Write what describes the whole, on rank 0.

    Durable but for names in the folder itself and in ``.dckpt``, which a commit makes durable.
    """
    if writer.takes_fingerprints:
        index = with_fingerprints(index, [written.sums for written in of_ranks])
    noted = [w.noted for w in (of_ranks if writer.gathers_results else of_ranks[:1])]
    unreported = writer.finish(Metadata.from_index(index), noted)
    files = [*(unreported or ())]
    files += [file for written in of_ranks for file in written.files]
    tables = {}
    if any(written.rows for written in of_ranks):
        tables = _write_tables(of_ranks, writer, files)
    return Finished(tuple(files), tables)


def finish_durably(index: Index, of_ranks: Sequence[Written], writer: StorageWriter) -> Finished:
    """Write what describes the whole, on rank 0, without a commit. Durable when it returns."""
    finished = finish_all(index, of_ranks, writer)
    if writer.options.durability is Durability.FSYNC:
        folder = writer.checkpoint_dir
        location.fsync_folders([folder / file.name for file in finished.files], folder)
        location.fsync_folder(folder)
    return finished


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
    uppers = np.frombuffer(b"".join(w.uppers for w in of_ranks), dtype="<u8")
    folder, durability = writer.checkpoint_dir, writer.options.durability
    location.make_folder(folder / CHECKSUMS_NAME)
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
    begin = 0
    for table_file in make_tables(columns):
        location.write_content(folder / table_file.name, table_file.data, durability)
        files.append(SealedFile.of_bytes(table_file.name, table_file.data))
        tables[table_file.name] = (table_file.first_key, table_file.last_key)
        if len(uppers) == len(digests):
            end = begin + table_file.num_rows
            file, data = upper_file(table_file, uppers[catalog.sources[begin:end]])
            location.write_content(folder / file.name, data, durability)
            files.append(file)
            begin = end
    if durability is Durability.FSYNC:
        location.fsync_folder(folder / CHECKSUMS_NAME)
    return tables


def write_plan(plan: SavePlan, planner: SavePlanner, writer: StorageWriter, rank: int) -> Written:
    """Write what one rank has to write, durably. Not collective."""
    summing = SummingPlanner(planner, plan) if writer.takes_fingerprints else None
    results = result_of(writer.write_data(plan, summing or planner))
    rows, checksums = _checksums(results, len(plan.table))
    packed, digests, uppers = b"", b"", b""
    if len(rows):
        kept = plan.table if len(rows) == len(plan.table) else plan.table.take(rows)
        packed = pack(replace(kept, ranks=np.full(len(kept), rank, dtype=np.int32)))
        digests = checksums.astype("<u8").tobytes()
        if isinstance(results, WriteResults) and results.uppers is not None:
            uppers = results.uppers[rows].astype("<u8").tobytes()
    noted = results_for_finish(results, plan)
    own = [results.rest] if isinstance(results, WriteResults) else results
    # Several items may share a file: the last size counts, which is the largest.
    files: dict[str, SealedFile] = {}
    for result in own:
        for file in result.files:
            known = files.get(file.name)
            if known is None or known.num_bytes <= file.num_bytes:
                files[file.name] = file
    sums = b"" if summing is None else summing.packed()
    return Written(noted, packed, digests, tuple(files.values()), sums=sums, uppers=uppers)


def _checksums(results: Sequence[WriteResult], count: int) -> tuple[Int64s, npt.NDArray[np.uint64]]:
    """The rows of a plan that have a checksum, and their checksums."""
    if isinstance(results, WriteResults):
        if results.checksums is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
        checked = results.checked
        rows = np.arange(count) if checked is None else np.flatnonzero(checked)
        return rows, results.checksums[rows]
    found = [
        (row, result.checksum)
        for row, result in enumerate(results[:count])
        if result.checksum is not None
    ]
    rows = np.array([row for row, _ in found], dtype=np.int64)
    return rows, np.array([checksum for _, checksum in found], dtype=np.uint64)


def read_plan(
    plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, index: Index, comm: Comm
) -> None:
    """Read the plans of all ranks, each rank its own. Collective.

    Args:
        plan: what this rank reads.
        planner: answers for its destinations.
        reader: of this rank.
        index: what the checkpoint holds.
        comm: the ranks that load together.
    """
    with comm.agreed("preparing to read"):
        plan = _prepare_read(plan, reader, index, comm)
    _read_prepared(plan, planner, reader, comm)


def _prepare_read(plan: LoadPlan, reader: StorageReader, index: Index, comm: Comm) -> LoadPlan:
    set_up_reader(reader, index, rank=comm.rank, world_size=comm.world_size)
    return reader.prepare_local_plan(plan)


def _read_prepared(plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, comm: Comm) -> None:
    if type(reader).prepare_global_plan is not StorageReader.prepare_global_plan:
        plans = comm.all_gather(plan)
        plan = comm.from_rank0("preparing to read", lambda: reader.prepare_global_plan(plans))[
            comm.rank
        ]
    with comm.agreed("reading"):
        result_of(reader.read_data(plan, planner))


def _crowded(wanted: TensorColumns, index: Index) -> list[StatedSize]:
    """Claims of the tensors with very many chunks in one leaf."""
    keys, shapes = wanted.keys, wanted.local_shapes
    if (index.rows_of(keys) >= 0).all():
        _, chunks = index.shapes_of(keys)
    else:
        chunks = list(map(index.chunk_shape, keys))
    # Most are wanted as they are stored.
    crowded = {
        wanted.leaves[row].key
        for row, (chunk, shape) in enumerate(zip(chunks, shapes, strict=True))
        if chunk is not None
        and tuple(chunk) != shape
        and meets_many(index[keys[row]], wanted.leaves[row].box)
    }
    return [stated_size(index[key]) for key in crowded]


def read(
    leaves: Leaves,
    index: Index,
    planner: LoadPlanner | None,
    reader: StorageReader,
    comm: Comm,
    plan_reader: PlanReader = read_plan,
) -> None:
    """Plan a load and drive a reader through it. Collective; every rank raises alike.

    All that is missing is found before the first byte is read.

    Args:
        leaves: of this rank; all have memory to fill.
        index: what the checkpoint holds.
        planner: decides what is read and where it goes; by default DefaultLoadPlanner.
        reader: of this rank.
        comm: the ranks that load together.
        plan_reader: reads what is planned.
    """
    wanted = WantedLeaves.of(leaves)
    # A planner of a user may do with them what one does with a dict.
    leaves = wanted if planner is None else dict(leaves)
    planner = DefaultLoadPlanner() if planner is None else planner
    with comm.agreed("planning the load"), paused_collector():
        reader.require_stored(_crowded(wanted.tensors, index), index)
        call_hook(
            planner.configure_planner,
            leaves,
            Metadata.from_index(index),
            is_coordinator=comm.rank == 0,
            rank=comm.rank,
        )
        plan = planner.build_local_plan()
        is_global = type(planner).build_global_plan is not LoadPlanner.build_global_plan
        if not is_global:
            plan = planner.finalize_plan(plan).placed(index, [*leaves.values()])
        # So that ranks wait for each other once and not twice.
        is_prepared = plan_reader is read_plan and not is_global
        if is_prepared:
            plan = _prepare_read(plan, reader, index, comm)
    if is_prepared:
        _read_prepared(plan, planner, reader, comm)
        return
    if is_global:
        plans = comm.all_gather(plan)
        with comm.agreed("planning the load"):
            plan = planner.finalize_plan(planner.build_global_plan(plans)[comm.rank])
            plan = plan.placed(index, [*leaves.values()])
    plan_reader(plan, planner, reader, index, comm)
