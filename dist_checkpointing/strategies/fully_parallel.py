"""Wrappers of save and load strategies with which ranks share the work on replicas.

On save the ranks of a group write about the same number of bytes each, since any replica of a shard
may be written. On load every byte that several ranks of the group want is read by one of them, and
broadcast. Files and loaded values are the same as without a wrapper.

All ranks of a group take part in all messages in the same order, also in those that they neither
send nor want. A rank with an error goes on to the end, so that no other rank waits for it, and
raises the error then.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from dist_checkpointing.comm import Comm, default_comm, group_comm
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format.geometry import Box, row_bytes, split_flat_range
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor, StateDict
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.planning import (
    BalancedSavePlanner,
    DefaultLoadPlanner,
    LoadPlan,
    LoadPlanner,
    ReadTable,
    SavePlanner,
    distribute_shards_to_ranks,
)
from dist_checkpointing.planning.chunking import WholeShardLayout
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.replica_balancing import check_replicas_have_data, share_out
from dist_checkpointing.planning.shard_table import Int64s, PackedTable, concatenate, describe, pack
from dist_checkpointing.planning.table_exchange import AgreedCache
from dist_checkpointing.planning.user_planner import overrides
from dist_checkpointing.storage.driver import read_plan
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    PathOrStr,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveShardedStrategy,
    handles_objects,
)
from dist_checkpointing.strategies.unplanned_strategies import WrappedLoadStrategy, as_planned

__all__ = ["distribute_shards_to_ranks"]  # beside what stands below

T = TypeVar("T")
Arrays = Callable[[int], torch.Tensor]
"""Row -> its memory on this rank."""
GivenGroup = dist.ProcessGroup | Comm | None
"""A process group, the comm of simulated ranks, or None for all ranks."""


class _Group(Generic[T]):
    """A group as a caller gives it, and what it has worked out. A rank outside of it is alone."""

    def __init__(self, given: GivenGroup, *, keeps: bool) -> None:
        self._given, self._keeps = given, keeps
        self.cache: AgreedCache[T] = AgreedCache(keeps=keeps)
        self._everybody: Comm | None = None
        self._comm: Comm
        self._numbers: list[int] | None = None

    def comm(self, everybody: Comm) -> Comm:
        """The group; all of ``everybody`` if none was given.

        Collective over ``everybody`` on first use.
        """
        if self._everybody is not everybody:
            self._comm, self._numbers = group_comm(self._given, everybody), None
            self._everybody = everybody
        return self._comm

    def numbers(self, everybody: Comm) -> list[int]:
        """The lowest rank in the group of each rank. Collective over ``everybody``."""
        if not self._keeps or self._numbers is None or self._everybody is not everybody:
            with everybody.agreed("finding out who shares"):
                lowest = min(self.comm(everybody).all_gather(everybody.rank))
            self._numbers = everybody.all_gather(lowest)
        return self._numbers


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Saves with another strategy. Each rank of a group writes a part of what is replicated.

    The state dict and its replica ids do not change. A strategy made of a StorageWriter gets a plan
    that is balanced to the chunk (see BalancedSavePlanner). Any other strategy, and one with a
    planner of its own, gets copies of the leaves whose replica ids say who writes. Sharded objects
    are written by their main replicas.

    Args:
        strategy: The strategy that writes.
        parallelization_group: The ranks that share their replicas, this one included. A shard is
            written in the group of its main replica. By default all ranks.
        do_cache_distribution: Whether to keep who writes which replica until the leaves of some
            rank of the group change. Of balanced plans, which every save makes of what all ranks
            bring, only the groups are kept. The same on all ranks.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, save
        >>> from dist_checkpointing.strategies import FullyParallelSaveStrategyWrapper
        >>> from dist_checkpointing.strategies.zarr import Zarr3SaveShardedStrategy
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", FullyParallelSaveStrategyWrapper(Zarr3SaveShardedStrategy()))
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: GivenGroup = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self._group: _Group[frozenset[tuple[int, int]]] = _Group(
            parallelization_group, keeps=do_cache_distribution
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.base_strategy)

    @property
    def cached_distribution(self) -> frozenset[tuple[int, int]] | None:
        """Each (rank in the group, position of its leaf) that is written, if that is kept."""
        return self._group.cache.value

    def resolved(self) -> SaveShardedStrategy:
        if not isinstance(self.base_strategy, PlannedSaveStrategy):
            return self
        strategy = copy.copy(self.base_strategy)
        strategy.share_replicas = self._shared
        return strategy

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr
    ) -> AsyncRequest:
        """Prepare a save. Collective over the group.

        Raises:
            CheckpointingException: if the wrapped strategy cannot save asynchronously.
        """
        strategy, own = self._sharing(sharded_state_dict)
        if not isinstance(strategy, AsyncSaveShardedStrategy):
            message = f"Cannot apply async_save to non-async strategy {strategy}"
            raise CheckpointingException(message)
        return strategy.async_save(own, checkpoint_dir)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> None:
        strategy, own = self._sharing(sharded_state_dict)
        strategy.save(own, checkpoint_dir)

    def _sharing(self, state: ShardedStateDict) -> tuple[SaveShardedStrategy, ShardedStateDict]:
        """What saves, and what of. Collective if the wrapped strategy does not plan by itself."""
        strategy = self.resolved()
        if isinstance(strategy, PlannedSaveStrategy):
            return strategy, state
        leaves, skeleton = flatten(state)
        return self.base_strategy, unflatten(skeleton, self._marked(leaves, default_comm()))

    def _shared(
        self, planner: SavePlanner | None, leaves: Leaves, comm: Comm
    ) -> tuple[SavePlanner, Leaves]:
        """See ``PlannedSaveStrategy.share_replicas``."""
        if planner is None:
            planner = BalancedSavePlanner()
        if isinstance(planner, BalancedSavePlanner):
            return planner.within(self._group.numbers(comm)), leaves
        with comm.agreed("sharing out the replicas"):
            return planner, self._marked(leaves, comm)

    def _marked(self, leaves: Leaves, everybody: Comm) -> Leaves:
        """Copies of the leaves with replica ids that say who writes. Collective over the group.

        A tensor whose main replica is in another group is not written here. Objects keep their
        replica ids, and so do all leaves in a group of one rank.
        """

        def describe_own() -> bytes:
            rows = list(leaves.values())
            check_replicas_have_data(rows)
            return pack(describe(rows, comm.rank))

        def writers_of(packed: Sequence[bytes]) -> frozenset[tuple[int, int]]:
            catalog = concatenate([PackedTable(data, rank) for rank, data in enumerate(packed)])
            planner = BalancedSavePlanner()
            planner.layout = WholeShardLayout()
            written, _ = planner.assign(catalog, len(packed))
            return frozenset(zip(written.ranks.tolist(), written.sources.tolist(), strict=True))

        comm = self._group.comm(everybody)
        if comm.world_size == 1:
            return leaves
        step = "sharing out the replicas"
        writers = self._group.cache.work_out(comm, step, describe_own, writers_of)
        marked: dict[Any, ShardedBase] = {}
        for source, (path, leaf) in enumerate(leaves.items()):
            marked[path] = copy.copy(leaf)
            if isinstance(leaf, ShardedTensor):
                # 0 is the main replica, which is written.
                marked[path].replica_id = int((comm.rank, source) not in writers)
        return marked


_ALIGNMENT_BYTES = 16
"""Tensors of any dtype may begin at such a position in a message."""
_HEAD = struct.Struct("<QQ")
_ROW = np.dtype([("digest", "V16"), ("num_bytes", "<i8"), ("itemsize", "<i8")])


def _wants(table: ReadTable, arrays: Arrays) -> npt.NDArray[np.void]:
    """A digest of each row that a rank wants in memory, its bytes and those of an element.

    Rows with one digest, the same part of the same chunk in memory of one dtype, have the same
    bytes.
    """
    dtypes = [arrays(row).dtype for row in range(len(table))]
    numbers = {dtype: _number(str(dtype)) for dtype in set(dtypes)}
    column = np.array([numbers[dtype] for dtype in dtypes], dtype=np.int64)
    keys = np.array([_number(name) for name in table.names], dtype=np.int64)
    ndims = np.maximum(table.ndim, table.window_ndim)
    scalars = [keys[table.keys], ndims, table.pieces, table.storage_starts, column]
    axes = (table.chunk_offsets, table.storage_shapes, table.storage_boxes, table.lengths)
    digests = b"".join(map(xxhash.xxh3_128_digest, row_bytes(scalars, axes, ndims)))
    rows = np.empty(len(table), dtype=_ROW)
    rows["digest"] = np.frombuffer(digests, dtype="V16")
    rows["itemsize"] = [dtype.itemsize for dtype in dtypes]
    rows["num_bytes"] = table.num_elements * rows["itemsize"]
    return rows


def _number(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements from ``first`` up to ``last`` of a row, at byte ``start`` of a message.

    The row is -1 where this rank does not want them.
    """

    row: int
    first: int
    last: int
    start: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


_Message = tuple[int, list[_Run]]
"""What one rank, the source, sends to all others at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """How one rank shares the reads of its group.

    It reads its own rows, ascending, and copies them to other rows that want the same. Messages are
    in the order in which they travel, and the same on all ranks but for the rows.
    """

    own: Int64s
    copies: tuple[tuple[int, int], ...]
    messages: Sequence[_Message]


def _share_reads(packed: Sequence[bytes], rank: int) -> Sharing | None:
    """How ranks share the reads; None if it is not worth it.

    Each rank has packed the memory that passing on may take there, the least bytes that several
    ranks must want, and what it wants.
    """
    wants = [np.frombuffer(data, _ROW, offset=_HEAD.size) for data in packed]
    memories, least = zip(*map(_HEAD.unpack_from, packed), strict=True)
    rows = np.concatenate(wants)
    ranks = np.repeat(np.arange(len(wants)), list(map(len, wants)))
    _, firsts, units = np.unique(rows["digest"], return_index=True, return_inverse=True)
    # A rank that wants something twice counts once.
    wanted, wanting = np.divmod(np.unique(units * len(wants) + ranks), len(wants))
    starts = np.searchsorted(wanted, np.arange(len(firsts) + 1))
    is_shared = np.diff(starts) > 1
    sizes = rows["num_bytes"][firsts]
    if not is_shared.any() or sizes[is_shared].sum() < max(least):
        return None
    loads = np.zeros(len(wants), dtype=np.int64)
    readers = share_out(wanting, starts, np.arange(len(firsts)), sizes, loads)
    mine = units[ranks == rank]
    _, first_rows = np.unique(mine, return_index=True)
    row_of = np.full(len(firsts), -1, dtype=np.int64)
    row_of[mine[first_rows]] = first_rows
    copies = np.flatnonzero(row_of[mine] != np.arange(len(mine)))
    in_order = np.argsort(firsts)
    traveling = in_order[is_shared[in_order]]
    columns = (readers, row_of, sizes, rows["itemsize"][firsts])
    sent = zip(*(column[traveling].tolist() for column in columns), strict=True)
    return Sharing(
        own=np.sort(row_of[(readers == rank) & (row_of >= 0)]),
        copies=tuple(zip(row_of[mine[copies]].tolist(), copies.tolist(), strict=True)),
        messages=list(_messages(sent, max(1, min(memories)))),
    )


def _messages(units: Iterable[tuple[int, int, int, int]], most_bytes: int) -> Iterator[_Message]:
    """Small units together, large ones in several messages.

    A unit is its reader, the row of this rank, its bytes and those of an element.
    """
    waiting: dict[int, list[_Run]] = {}
    for reader, row, size, itemsize in units:
        step = max(1, most_bytes // itemsize)
        runs = waiting.pop(reader, [])
        for first in range(0, size // itemsize, step):
            last = min(first + step, size // itemsize)
            num_bytes = (last - first) * itemsize
            start = -(-(runs[-1].stop if runs else 0) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if runs and start + num_bytes > most_bytes:
                yield reader, runs
                runs, start = [], 0
            runs.append(_Run(row, first, last, start, num_bytes))
        waiting[reader] = runs
    yield from sorted((reader, runs) for reader, runs in waiting.items() if runs)


def _pass_on(sharing: Sharing, arrays: Arrays, comm: Comm, report: Callable[[int], None]) -> None:
    """Fill every row that this rank wants and another rank has read. Collective.

    A message that is one run of memory is sent from, or received into, the array itself. All others
    go through one buffer, as large as the largest of them.
    """
    device, error = comm.tensor_device, None
    with comm.agreed("preparing to pass on what was read"):
        messages = [(*own, _memory_of(own[1], arrays, device)) for own in sharing.messages]
        longest = max((runs[-1].stop for _, runs, memory in messages if memory is None), default=0)
        buffer = torch.empty(longest, dtype=torch.uint8, device=device)
    for source, runs, memory in messages:
        is_sent = source == comm.rank
        data = buffer[: runs[-1].stop] if memory is None else memory
        copied = partial(_copy, runs, arrays, data, packs=is_sent)
        if is_sent and memory is None:
            error = error or Outcome.of(_PASSING, copied).error
        comm.broadcast_tensor(data, source)
        if not is_sent and memory is None:
            error = error or Outcome.of(_PASSING, copied).error
        if not is_sent:
            report(sum(run.num_bytes for run in runs if run.row >= 0))
    with comm.agreed(_PASSING):
        if error is not None:
            raise error
        for row, other in sharing.copies:
            arrays(other).copy_(arrays(row))


def _copy(runs: Sequence[_Run], arrays: Arrays, data: torch.Tensor, *, packs: bool) -> None:
    """Copy what this rank sends into a message, or what it wants out of it."""
    for run in runs:
        if run.row < 0:
            continue
        array = arrays(run.row)
        values = data[run.start : run.start + run.num_bytes].view(array.dtype)
        boxes = [Box.whole(tuple(array.shape))]
        if len(values) < array.numel():
            boxes = split_flat_range(tuple(array.shape), run.first, run.last)
        for box in boxes:
            held, sent = array[box.slices()], values[: box.num_elements].view(box.shape)
            (sent if packs else held).copy_(held if packs else sent)
            values = values[box.num_elements :]


def _memory_of(runs: Sequence[_Run], arrays: Arrays, device: torch.device) -> torch.Tensor | None:
    """The memory of this rank that is the whole message; None if there is none."""
    run, *others = runs
    if others or run.row < 0:
        return None
    array = arrays(run.row)
    is_plain = array.is_contiguous() and not array.is_conj() and not array.is_neg()
    if array.device.type != device.type or not is_plain:
        return None
    # A tensor of one element is contiguous whatever its strides are.
    flat = array.as_strided((array.numel(),), (1,))
    return flat[run.first : run.last].view(torch.uint8)


MIN_SHARED_BYTES = 16 * 2**20
"""Sharing takes about 10 ms, however little is shared (two gloo ranks on one machine).

Two ranks that each read half of 16 MiB save that much time if a rank reads 1 GB/s, and more if it
reads less. From the page cache each rank was faster alone at any size.
"""
ExchangeAlgorithm = Literal["broadcast", "gather_object", "gather_rounds"]
_SHARING = "sharing out the reads"
_PASSING = "passing on what was read"


class FullyParallelLoadStrategyWrapper(WrappedLoadStrategy):
    """Loads with another strategy. Each byte is read by one rank of a group and passed on.

    What is loaded is the same as without it. Tensors are filled in place. Every rank reads its own
    sharded objects, which are small, and a rank with a load planner that overrides
    ``acquire_tensor`` or ``apply_tensor`` reads everything itself. Sharing pays where reading is
    slower than the network between the ranks, such as on a file system that many replicas share.

    Args:
        strategy: The strategy that reads.
        parallelization_group: The ranks that share their reads, this one included. By default all.
        do_cache_distribution: Whether to keep who reads what until some rank of the group wants
            something else. The same on all ranks.
        exchange_algo: One of the names with which Megatron chooses how ranks pass on what they
            have read. All of them mean the same here: a broadcast from the reader to the group.
        min_shared_bytes: If several ranks of a group want fewer bytes than that in common, each
            rank reads for itself.

    Raises:
        ValueError: for an exchange_algo that does not exist.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, load, save
        >>> from dist_checkpointing.strategies import FullyParallelLoadStrategyWrapper
        >>> from dist_checkpointing.strategies.zarr import Zarr3LoadShardedStrategy
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(3))}, "ckpt", "zarr")
        >>> template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, dtype=int))}
        >>> strategy = FullyParallelLoadStrategyWrapper(Zarr3LoadShardedStrategy())
        >>> load(template, "ckpt", strategy)
        {'w': tensor([0, 1, 2])}
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: GivenGroup = None,
        do_cache_distribution: bool = False,
        exchange_algo: ExchangeAlgorithm = "broadcast",
        *,
        min_shared_bytes: int = MIN_SHARED_BYTES,
    ) -> None:
        if exchange_algo not in get_args(ExchangeAlgorithm):
            known = ", ".join(map(repr, get_args(ExchangeAlgorithm)))
            raise ValueError(f"exchange_algo must be one of {known}, not {exchange_algo!r}")
        self.base_strategy = strategy
        self._group: _Group[Sharing | None] = _Group(
            parallelization_group, keeps=do_cache_distribution
        )
        self._min_shared_bytes = min_shared_bytes

    @property
    def cached_distribution(self) -> Sharing | None:
        """Who reads what, if that is kept."""
        return self._group.cache.value

    def for_format(self, backend: str, version: int) -> PlannedLoadStrategy:
        wrapper = copy.copy(self)
        wrapper.base_strategy = self.base_strategy.for_format(backend, version)
        return wrapper.resolved()

    def resolved(self) -> PlannedLoadStrategy:
        """The wrapped strategy, set to share its reads."""
        strategy = copy.copy(as_planned(self.base_strategy))
        strategy.plan_reader = self._read_plan
        return strategy

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        if not isinstance(self.base_strategy, PlannedLoadStrategy):
            try:
                self.base_strategy.load_tensors_metadata(checkpoint_dir)
            except NotImplementedError:  # it can only load, so each rank reads for itself
                return self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        return self.resolved().load(sharded_state_dict, checkpoint_dir)

    def _read_plan(
        self, plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, index: Index, comm: Comm
    ) -> None:
        """Read a share of the plan, and get the rest from other ranks. Collective.

        The arguments are those of ``read_plan``.
        """
        # Other groups must not wait for one in which something failed: all agree on every step.
        with comm.agreed(_SHARING):
            group = self._group.comm(comm)
            # Only memory of leaves can be passed on.
            methods = "acquire_tensor", "apply_tensor"
            is_default = isinstance(planner, DefaultLoadPlanner)
            is_own = not is_default or overrides(planner, DefaultLoadPlanner, *methods)
            alone = plan.table.is_object | is_own
            table = plan.table.take(~alone)
            acquire = planner.destinations(replace(plan, table=table)).acquire
            head = _HEAD.pack(reader.options.buffer_bytes, self._min_shared_bytes)
            sharing = None
            if group.world_size > 1:
                sharing = self._group.cache.work_out(
                    group,
                    _SHARING,
                    lambda: head + _wants(table, acquire).tobytes(),
                    lambda packed: _share_reads(packed, group.rank),
                )
            own = table if sharing is None else table.take(sharing.own)
            plan = replace(plan, table=own.followed_by(plan.table.take(alone)))
        read_plan(plan, planner, reader, index, comm)
        with comm.agreed(_PASSING):
            if sharing is not None:
                _pass_on(sharing, lambda row: acquire(row).detach(), group, reader.report)
