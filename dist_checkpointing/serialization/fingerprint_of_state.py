"""The fingerprints of what is in memory now, and whether a load has restored what was saved."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.comm.defaults import chosen_comm
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import Index, read_index
from dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedStateful,
    ShardedTensor,
    tensor_memory,
)
from dist_checkpointing.mapping.nested_dicts import DictKey
from dist_checkpointing.mapping.nested_dicts import Path as TreePath
from dist_checkpointing.mapping.objects_and_factories import as_state_dict
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.coverage import check_coverage, find_coverage_problems
from dist_checkpointing.planning.replica_check import Copies, copies_of
from dist_checkpointing.planning.shard_table import Bools, ShardTable, describe
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.fingerprints import (
    NOTHING,
    Sums,
    added,
    fingerprint_of,
    fingerprints_by_reading,
    sums_of_shard,
)
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.validation.save_errors import check_data, refuse_distributed

logger: logging.Logger = logging.getLogger(__name__)

_ROW = np.dtype([("number", "<i4"), ("sums", "<u8", (2,))])


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
    is_main: list[bool] = []

    def describe_local() -> tuple[dict[str, ShardTable], None]:
        parts = StateDictParts.of(state_dict)
        refuse_distributed(parts, {})
        check_data(parts)
        shards.extend(parts.tensors.values())
        table = describe(shards, comm.rank)
        is_main.extend(table.main.tolist())
        return {"shards": table}, None

    catalog = exchange_tables(comm, "describing the shards", describe_local).catalog("shards")
    with comm.agreed("checking the shards"):
        check_coverage(catalog)
    number = {name: position for position, name in enumerate(catalog.names)}

    def sum_up() -> bytes:
        mains = itertools.compress(shards, is_main)
        rows = [(number[shard.key], sums_of_shard(shard)) for shard in mains]
        return np.array(rows, dtype=_ROW).tobytes()

    total = np.zeros((len(catalog.names), 2), dtype=np.uint64)
    for data in comm.exchange("summing the values", sum_up):
        rows = np.frombuffer(data, dtype=_ROW)
        np.add.at(total, rows["number"], rows["sums"])
    return _fingerprints(catalog, {name: total[row].tolist() for name, row in number.items()})


def verify_restored(
    shards: Sequence[ShardedTensor],
    folder: Location,
    index: Index,
    make_reader: Callable[[], StorageReader],
    comm: Comm,
) -> None:
    """Compare what lies in memory after a load with the fingerprints of the save. Collective.

    Copies of one part must be the same on all ranks. Tensors that the ranks do not hold whole, or
    in another shape or dtype than the stored one, have nothing to be compared with: a warning
    names them. Fingerprints that the save did not keep are computed from what is stored, which
    the ranks read once more together.

    Args:
        shards: Of this rank, filled.
        folder: Folder of the checkpoint.
        index: Index of the checkpoint, with the keys of this rank.
        make_reader: Makes a reader of the checkpoint.
        comm: Ranks that have loaded together.

    Raises:
        CorruptCheckpointError: naming every tensor that is not what was saved.
    """

    def describe_local() -> tuple[dict[str, ShardTable], set[str]]:
        differing = set()
        for shard in shards:
            stored = index.get(shard.key)
            kind = (tensor_memory.from_torch(shard.dtype).name, tuple(shard.global_shape))
            if stored is None or (stored.dtype.name, stored.global_shape) != kind:
                differing.add(shard.key)
        return {"shards": describe(shards, comm.rank)}, differing

    exchanged = exchange_tables(comm, "describing what was restored", describe_local)
    with comm.agreed("looking for what can be compared"):
        copies = copies_of(exchanged.catalog("shards"), comm.rank)
        parts = copies.parts
        is_counted = _counted(copies, set().union(*exchanged.facts))
        counted = {parts.key(row) for row in np.flatnonzero(is_counted).tolist()}

    def stored_fingerprints() -> dict[str, str]:
        whole = read_index(folder)
        return {} if whole is None else {**whole.fingerprints}

    kept: dict[str, str] = comm.from_rank0("reading the fingerprints", stored_fingerprints)
    missing = _shared_out(sorted(counted - kept.keys()), parts, comm.rank)
    for computed in comm.exchange(
        "reading for fingerprints", lambda: _by_reading(missing, index, make_reader)
    ):
        kept |= computed
    is_lowest_holder = (parts.ranks == comm.rank).tolist()
    sums: dict[int, Sums] = {}
    findings: list[Finding] = []

    def sum_up() -> bytes:
        for shard, part in zip(shards, copies.local.tolist(), strict=True):
            if shard.key in counted:
                found = sums_of_shard(shard)
                if sums.setdefault(part, found) != found:
                    findings.append(_differs(copies, part, (comm.rank,)))
        rows = [(part, found) for part, found in sums.items() if is_lowest_holder[part]]
        return np.array(rows, dtype=_ROW).tobytes()

    totals = dict.fromkeys(counted, NOTHING)
    for data in comm.exchange("summing what was restored", sum_up):
        rows = np.frombuffer(data, dtype=_ROW)
        for part, pair in zip(rows["number"].tolist(), rows["sums"].tolist(), strict=True):
            found = (pair[0], pair[1])
            if is_counted[part]:
                totals[parts.key(part)] = added((totals[parts.key(part)], found))
            if sums.get(part, found) != found:
                findings.append(_differs(copies, part, (int(parts.ranks[part]), comm.rank)))
    with comm.agreed("comparing fingerprints"):
        if comm.rank == 0:
            remedy = "Load with verify=True, which tells whether the stored data is damaged."
            findings += [
                Finding(
                    "what lies in memory is not what was saved",
                    key,
                    expected=kept[key],
                    found=found,
                    remedy=remedy,
                )
                for key, found in _fingerprints(parts, totals).items()
                if found != kept[key]
            ]
            if others := sorted({*parts.key_column} - counted):
                logger.warning(
                    "%s: %d tensors are not compared with what was saved, because the ranks do not"
                    " hold all of them in the stored dtype and shape: %s",
                    folder,
                    len(others),
                    ", ".join(others[:10]) + (", ..." if len(others) > 10 else ""),
                )
        if findings:
            raise CorruptCheckpointError("what was restored is not what was saved", findings)


def _fingerprints(table: ShardTable, sums: Mapping[str, Sums]) -> dict[str, str]:
    """The fingerprints of the tensors of a table whose sums are given."""
    fingerprints = {}
    for row in np.unique(table.keys, return_index=True)[1].tolist():
        key = table.key(row)
        if key in sums:
            fingerprints[key] = fingerprint_of(sums[key], table.dtype(row), table.global_shape(row))
    return fingerprints


def _counted(copies: Copies, differing: set[str]) -> Bools:
    """The parts that together make up each tensor once, for all tensors where there are such."""
    parts, catalog = copies.parts, copies.catalog
    if not len(parts):
        return np.zeros(0, dtype=np.bool_)
    has_elements = parts.num_elements > 0
    # Parts that differ may overlap: then those of main replicas may do.
    is_main = np.logical_or.reduceat(catalog.main[copies.rows], copies.begins[:-1])
    is_counted = np.zeros(len(parts), dtype=np.bool_)
    is_open = np.array([name not in differing for name in parts.names])[parts.keys]
    for chosen in (np.ones_like(is_main), is_main):
        written = parts.take(np.flatnonzero(chosen & has_elements))
        broken = {finding.key for finding in find_coverage_problems(catalog, written)}
        fits = is_open & np.array([name not in broken for name in parts.names])[parts.keys]
        is_counted |= fits & chosen
        is_open &= ~fits
        if not is_open.any():
            break
    return is_counted


def _shared_out(keys: Sequence[str], parts: ShardTable, rank: int) -> list[str]:
    """The keys that a rank reads: of each key a rank that holds a part of it."""
    wanted = {key: number for number, key in enumerate(keys)}
    ranks: dict[str, list[int]] = {key: [] for key in keys}
    for key, holder in zip(parts.key_column if keys else (), parts.ranks.tolist(), strict=False):
        if key in wanted:
            ranks[key].append(holder)
    return [key for key, held in ranks.items() if held[wanted[key] % len(held)] == rank]


def _by_reading(
    keys: Sequence[str], index: Index, make_reader: Callable[[], StorageReader]
) -> dict[str, str]:
    def read_boxes(wanted: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        leaves: dict[TreePath, ShardedTensor] = {}
        for number, (key, box) in enumerate(wanted):
            leaf = leaves[DictKey(number),] = ShardedTensor.of_box(index[key], box)
            leaf.init_data("cpu")
        # Not by the planner of the strategy: it may put other values into memory.
        read(leaves, index, None, make_reader(), SingleProcess())
        return [leaf.data for leaf in leaves.values() if leaf.data is not None]

    return fingerprints_by_reading(index, keys, read_boxes)


def _differs(copies: Copies, part: int, ranks: tuple[int, ...]) -> Finding:
    problem = "copies of one part differ in memory after the load"
    box = str(copies.parts.box(part))
    return Finding(problem, copies.parts.key(part), found=box, ranks=ranks)
