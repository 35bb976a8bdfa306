"""The fingerprints of what is in memory now, and whether a load has restored what was saved."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import numpy as np
import torch

from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import Uint64s
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, read_index
from dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedStateful,
    ShardedTensor,
    is_main_replica,
    tensor_memory,
)
from dist_checkpointing.mapping.objects_and_factories import as_state_dict
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.coverage import check_coverage, find_coverage_problems
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.planning.replica_check import Copies, copies_of
from dist_checkpointing.planning.shard_table import Bools, ShardTable, describe
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.fingerprints import (
    SUMS_ROW,
    Sums,
    fingerprint_of,
    fingerprints_by_reading,
    sums_of_shard,
    totals,
)
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.validation.load_errors import with_memory
from dist_checkpointing.validation.save_errors import check_data, refuse_distributed, walk

logger: logging.Logger = logging.getLogger(__name__)


def fingerprint(
    sharded_state_dict: ShardedStateDict | ShardedStateful, *, comm: Comm | None = None
) -> dict[str, str]:
    """The fingerprint of every global tensor of the state dicts of all ranks. Collective.

    It depends on the values, dtype and global shape of a tensor, and not on how ranks share it: a
    state has the same fingerprints on any number of ranks. Main replicas count, as in a save.
    Common state and sharded objects have none. It shows accidents, and is no defence against
    somebody who wants two tensors to look alike. See docs/design/009-fingerprints.md.

    Args:
        sharded_state_dict: see ``save``.
        comm: the ranks that hold it; by default all of torch.distributed, or this process.

    Returns:
        32 hex digits for each key, on every rank.

    Raises:
        InvalidShardingError: what ``save`` would raise: the shards do not make up each global
            tensor exactly once, or main replicas have no data.

    Example:
        >>> whole = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
        >>> fingerprint({"w": whole})
        {'w': '2e183e35fa38af98a434abd585d434f1'}
    """
    comm = chosen_comm(comm)
    state_dict = as_state_dict(sharded_state_dict, comm)
    shards: list[ShardedTensor] = []

    def describe_local() -> tuple[dict[str, ShardTable], None]:
        parts = StateDictParts.of(state_dict)
        refuse_distributed(walk(parts.common), parts.tensors, {})
        check_data(parts.tensors)
        shards.extend(parts.tensors.values())
        return {"tensors": describe(shards, comm.rank)}, None

    catalog = exchange_tables(comm, "describing the shards", describe_local).catalog("tensors")
    with comm.agreed("checking the shards"):
        check_coverage(catalog)
    number = {name: position for position, name in enumerate(catalog.names)}

    def sum_up() -> bytes:
        mains = (shard for shard in shards if is_main_replica(shard.replica_id))
        rows = [(number[shard.key], sums_of_shard(shard)) for shard in mains]
        return np.array(rows, dtype=SUMS_ROW).tobytes()

    sums = totals(len(catalog.names), comm.exchange("summing the values", sum_up))
    return _fingerprints(catalog, sums)


def verify_restored(
    shards: Sequence[ShardedTensor],
    folder: Location,
    index: Index,
    reader: StorageReader,
    comm: Comm,
) -> None:
    """Compare what lies in memory after a load with the fingerprints of the save. Collective.

    Copies of one part must be the same on all ranks. Tensors that the ranks do not hold whole, or
    in another shape or dtype than the stored one, have nothing to be compared with: a warning
    names them. Fingerprints that the save did not keep are computed from what is stored, which
    the ranks read once more together, with the reader of the load. The index has the keys of this
    rank.

    A CorruptCheckpointError names every tensor that is not what was saved.
    """

    def describe_local() -> tuple[dict[str, ShardTable], set[str]]:
        differing = set()
        for shard in shards:
            stored = index.get(shard.key)
            kind = (tensor_memory.from_torch(shard.dtype).name, tuple(shard.global_shape))
            if stored is None or (stored.dtype.name, stored.global_shape) != kind:
                differing.add(shard.key)
        return {"tensors": describe(shards, comm.rank)}, differing

    exchanged = exchange_tables(comm, "describing what was restored", describe_local)
    with comm.agreed("looking for what can be compared"):
        copies = copies_of(exchanged.catalog("tensors"), comm.rank)
        parts = copies.parts
        is_counted = _counted(copies, set().union(*(own.value for own in exchanged.facts)))
        numbers = np.unique(parts.keys[is_counted])
        counted = {parts.names[number] for number in numbers.tolist()}

    def stored_fingerprints() -> dict[str, str]:
        whole = read_index(folder)
        return {} if whole is None else {**whole.fingerprints}

    # A reader may know what its own ``read_metadata`` gave, so that a new one could not read.
    reader = copy.copy(reader)
    reader.report = lambda _: None
    kept: dict[str, str] = comm.from_rank0("reading the fingerprints", stored_fingerprints)

    def compute_missing() -> dict[str, str]:
        missing = numbers[[parts.names[number] not in kept for number in numbers.tolist()]]
        # Ranks that hold a tensor take turns: no other rank has it in its index.
        begins, ends = (np.searchsorted(parts.keys, missing, side) for side in ("left", "right"))
        readers = parts.ranks[begins + np.arange(len(missing)) % (ends - begins)]
        keys = [parts.names[number] for number in missing[readers == comm.rank].tolist()]
        return fingerprints_by_reading(index, keys, read_boxes)

    def read_boxes(wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        leaves = [with_memory(ShardedTensor.of_box(index[key], box)) for key, box in wanted]
        # Not by the planner of the strategy: it may put other values into memory.
        read(WantedTable.of(leaves), index, None, reader, SingleProcess())
        return [leaf.data for leaf in leaves if leaf.data is not None]

    for computed in comm.exchange("reading for fingerprints", compute_missing):
        kept |= computed
    held: list[tuple[int, Sums]] = []

    def sum_up() -> bytes:
        """The sums of one copy of each part of which this rank is the lowest holder."""
        local = zip(copies.local.tolist(), shards, strict=True)
        held.extend((part, sums_of_shard(shard)) for part, shard in local if shard.key in counted)
        rows = [(part, sums) for part, sums in dict(held).items() if parts.ranks[part] == comm.rank]
        return np.array(rows, dtype=SUMS_ROW).tobytes()

    of_parts = totals(len(parts), comm.exchange("summing what was restored", sum_up))
    with comm.agreed("comparing fingerprints"):
        findings = [
            Finding(
                "copies of one part differ in memory after the load",
                parts.key(part),
                found=str(parts.box(part)),
                ranks=tuple(sorted({int(parts.ranks[part]), comm.rank})),
            )
            for part in sorted(
                {part for part, sums in held if tuple(of_parts[part].tolist()) != sums}
            )
        ]
        if comm.rank == 0:
            of_names = np.zeros((len(parts.names), 2), dtype=np.uint64)
            np.add.at(of_names, parts.keys[is_counted], of_parts[is_counted])
            findings += [
                Finding(
                    "what lies in memory is not what was saved",
                    key,
                    expected=kept[key],
                    found=found,
                    remedy="Load with verify=True, which tells whether the stored data is damaged.",
                )
                for key, found in _fingerprints(parts, of_names).items()
                if key in counted and found != kept[key]
            ]
            if others := sorted({*parts.key_column} - counted):
                logger.warning(
                    "%s: tensors not compared with what was saved (%d), because the ranks do not"
                    " hold all of them in the stored dtype and shape: %s",
                    folder,
                    len(others),
                    ", ".join(others[:10]) + (", ..." if len(others) > 10 else ""),
                )
        CorruptCheckpointError.raise_if(findings, "what was restored is not what was saved")


def _fingerprints(table: ShardTable, sums: Uint64s) -> dict[str, str]:
    """The fingerprints of the tensors of a table; the sums are those of each of its names."""
    names, rows = np.unique(table.keys, return_index=True)
    return {
        table.key(row): fingerprint_of(of_name, table.dtype(row), table.global_shape(row))
        for of_name, row in zip(sums[names].tolist(), rows.tolist(), strict=True)
    }


def _counted(copies: Copies, differing: set[str]) -> Bools:
    """The parts that together make up each tensor once, for all tensors where there are such."""
    parts = copies.parts
    is_counted = np.zeros(len(parts), dtype=np.bool_)
    if not len(parts):
        return is_counted
    # Parts that differ may overlap: then those of main replicas may do.
    is_main = copies.has_main
    unknown = {*parts.names} - differing
    for chosen in (np.ones_like(is_main), is_main):
        written = parts.take(np.flatnonzero(chosen & (parts.num_elements > 0)))
        broken = {finding.key for finding in find_coverage_problems(copies.catalog, written)}
        fits = np.array([name in unknown and name not in broken for name in parts.names])
        is_counted |= fits[parts.keys] & chosen
        unknown &= broken
        if not unknown:
            break
    return is_counted
