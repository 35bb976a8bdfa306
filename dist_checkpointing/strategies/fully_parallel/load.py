"""Wrapper: one rank of a group reads what several want, and broadcasts it.

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
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.format.geometry import Box, row_bytes, split_flat_range
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedStateDict, StateDict
from dist_checkpointing.planning import DefaultLoadPlanner, LoadPlan, LoadPlanner
from dist_checkpointing.planning.load_plan import ReadTable
from dist_checkpointing.planning.replica_balancing import share_out
from dist_checkpointing.planning.shard_table import Int64s
from dist_checkpointing.storage.driver import read_plan
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    PathOrStr,
    PlannedLoadStrategy,
)
from dist_checkpointing.strategies.fully_parallel.save import GivenGroup, ParallelizationGroup
from dist_checkpointing.strategies.unplanned_strategies import WrappedLoadStrategy, as_planned

_ALIGNMENT_BYTES = 16
"""Tensors of any dtype may begin at such a position in a message."""
Rows = npt.NDArray[np.void]
_HEAD = struct.Struct("<QQ")
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("num_bytes", "<i8"), ("itemsize", "<i8")])


def rows_of_table(table: ReadTable, acquire: Callable[[int], torch.Tensor]) -> Rows:
    """What one rank wants to have in memory: a digest of each row, its bytes and those of an
    element.

    Rows with one digest, the same part of the same chunk in memory of one dtype, have the same
    bytes.
    """
    dtypes = [acquire(row).dtype for row in range(len(table))]
    numbers = {dtype: _number(str(dtype)) for dtype in set(dtypes)}
    column = np.array([numbers[dtype] for dtype in dtypes], dtype=np.int64)
    keys = np.array([_number(name) for name in table.names], dtype=np.int64)
    ndims = np.maximum(table.ndim, table.window_ndim)
    scalars = [keys[table.keys], ndims, table.pieces, table.storage_starts, column]
    axes = (table.chunk_offsets, table.storage_shapes, table.storage_boxes, table.lengths)
    digests = b"".join(map(xxhash.xxh3_128_digest, row_bytes(scalars, axes, ndims)))
    rows = np.empty(len(table), dtype=_ROW)
    rows["high"], rows["low"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T
    rows["itemsize"] = [dtype.itemsize for dtype in dtypes]
    rows["num_bytes"] = table.num_elements * rows["itemsize"]
    return rows


def _number(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


@dataclass(frozen=True, slots=True)
class ElementRun:
    """A run of elements on its way: from ``first`` up to ``last``, from byte ``start`` of a
    message.

    The row is -1 where this rank does not want them.
    """

    row: int
    first: int
    last: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to all others at a time."""

    source: int
    runs: tuple[ElementRun, ...]

    @property
    def num_bytes(self) -> int:
        return self.runs[-1].start + self.runs[-1].num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """How one rank shares the reads of its group.

    It reads its own rows, ascending, and copies them to other rows that want the same. Messages are
    in the order in which they travel, and the same on all ranks but for the rows.
    """

    own: Int64s
    copies: tuple[tuple[int, int], ...]
    messages: Sequence[Message]


def _numbered(high: Any, low: Any) -> tuple[Int64s, Int64s]:
    """Number of the unit of each row, and the first row of each unit; equal rows are one unit."""
    order = np.lexsort((low, high))
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    firsts = order[begins]  # Sorting is stable.
    by_appearance = np.argsort(firsts)
    units = np.empty(len(order), dtype=np.int64)
    units[order] = np.argsort(by_appearance)[np.cumsum(begins) - 1]
    return units, firsts[by_appearance]


def share_reads(packed: Sequence[bytes], rank: int) -> Sharing | None:
    """How ranks share the reads; None if it is not worth it.

    Args:
        packed: of each rank, the memory that passing on may take there, the least bytes that
            several ranks must want, and what it wants.
        rank: this one.
    """
    wants = [np.frombuffer(data, _ROW, offset=_HEAD.size) for data in packed]
    memories, least = zip(*map(_HEAD.unpack_from, packed), strict=True)
    rows = np.concatenate(wants)
    ranks = np.repeat(np.arange(len(wants)), list(map(len, wants)))
    units, firsts = _numbered(rows["high"], rows["low"])
    # A rank that wants something twice counts once.
    wanted, wanting = np.divmod(np.unique(units * len(wants) + ranks), len(wants))
    starts = np.searchsorted(wanted, np.arange(len(firsts) + 1))
    is_shared = np.diff(starts) > 1
    sizes = rows["num_bytes"][firsts]
    if not is_shared.any() or sizes[is_shared].sum() < max(least):
        return None
    loads = np.zeros(len(wants), dtype=np.int64)
    readers = wanting[share_out(wanting, starts, np.arange(len(firsts)), sizes, loads)]
    mine = units[ranks == rank]
    _, first_rows = np.unique(mine, return_index=True)
    row_of = np.full(len(firsts), -1, dtype=np.int64)
    row_of[mine[first_rows]] = first_rows
    copies = np.flatnonzero(row_of[mine] != np.arange(len(mine)))
    traveling = np.flatnonzero(is_shared)
    columns = (readers, row_of, sizes, rows["itemsize"][firsts])
    sent = zip(*(column[traveling].tolist() for column in columns), strict=True)
    return Sharing(
        own=np.sort(row_of[(readers == rank) & (row_of >= 0)]),
        copies=tuple(zip(row_of[mine[copies]].tolist(), copies.tolist(), strict=True)),
        messages=list(_messages(sent, max(1, min(memories)))),
    )


def _messages(units: Iterable[tuple[int, int, int, int]], most_bytes: int) -> Iterator[Message]:
    """Small units together, large ones in several messages.

    A unit is its reader, the row of this rank, its bytes and those of an element.
    """
    waiting: dict[int, list[ElementRun]] = {}
    for reader, row, size, itemsize in units:
        step = max(1, most_bytes // itemsize)
        runs = waiting.setdefault(reader, [])
        for first in range(0, size // itemsize, step):
            last = min(first + step, size // itemsize)
            num_bytes = (last - first) * itemsize
            end = runs[-1].start + runs[-1].num_bytes if runs else 0
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if runs and start + num_bytes > most_bytes:
                yield Message(reader, tuple(runs))
                runs.clear()
                start = 0
            runs.append(ElementRun(row, first, last, start, num_bytes))
    for reader, runs in sorted(waiting.items()):
        yield Message(reader, tuple(runs))


Arrays = Callable[[int], torch.Tensor]
"""Row -> its memory on this rank."""


def pass_on(sharing: Sharing, arrays: Arrays, comm: Comm, report: Callable[[int], None]) -> None:
    """Fill every row that this rank wants and another rank has read. Collective.

    A message that is one run of memory is sent from, or received into, the array itself. All others
    go through one buffer, as large as the largest of them.
    """
    messages, device, error = sharing.messages, comm.tensor_device, None
    with comm.agreed("preparing to pass on what was read"):
        memories = [_memory_of(message, arrays, device) for message in messages]
        pairs = list(zip(messages, memories, strict=True))
        longest = max((message.num_bytes for message, memory in pairs if memory is None), default=0)
        buffer = torch.empty(longest, dtype=torch.uint8, device=device)
    for message, memory in pairs:
        is_sent = message.source == comm.rank
        data = buffer[: message.num_bytes] if memory is None else memory
        copy_message = partial(_copy, message, arrays, data, packs=is_sent)
        if is_sent and memory is None:
            error = error or Outcome.of(_PASSING, copy_message).error
        comm.broadcast_tensor(data, message.source)
        if not is_sent:
            if memory is None:
                error = error or Outcome.of(_PASSING, copy_message).error
            report(sum(run.num_bytes for run in message.runs if run.row >= 0))
    with comm.agreed("passing on what was read"):
        if error is not None:
            raise error
        for row, other in sharing.copies:
            arrays(other).copy_(arrays(row))


def _copy(message: Message, arrays: Arrays, data: torch.Tensor, *, packs: bool) -> None:
    """Copy what this rank sends into a message, or what it wants out of it."""
    for run in message.runs:
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


def _memory_of(message: Message, arrays: Arrays, device: torch.device) -> torch.Tensor | None:
    """The memory of this rank that is the whole message; None if there is none."""
    (run, *others) = message.runs
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
        >>> from dist_checkpointing.strategies.fully_parallel import (
        ...     FullyParallelLoadStrategyWrapper,
        ... )
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
        self._group: ParallelizationGroup[Sharing | None] = ParallelizationGroup(
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

    def _share(self, describe: Callable[[], Rows], comm: Comm, buffer_bytes: int) -> Sharing | None:
        """Who reads what; None if each reads for itself. Collective over the group ``comm``."""
        if comm.world_size == 1:
            return None

        def wants_of_rank() -> bytes:
            return _HEAD.pack(buffer_bytes, self._min_shared_bytes) + describe().tobytes()

        return self._group.cache.work_out(
            comm, _SHARING, wants_of_rank, lambda packed: share_reads(packed, comm.rank)
        )

    def _read_plan(
        self, plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, index: Index, comm: Comm
    ) -> None:
        """Read a share of the plan, and get the rest from other ranks. Collective.

        The arguments are those of ``read_plan``.
        """
        # Other groups must not wait for one in which something failed: all agree on every step.
        with comm.agreed(_SHARING), self._group.comm(comm) as group:
            alone = plan.table.is_object | (not _fills_leaves(planner))
            table = plan.table.take(~alone)
            acquire = planner.destinations(replace(plan, table=table)).acquire
            sharing = self._share(
                lambda: rows_of_table(table, acquire), group, reader.options.buffer_bytes
            )
            own = table if sharing is None else table.take(sharing.own)
            plan = replace(plan, table=own.followed_by(plan.table.take(alone)))
        read_plan(plan, planner, reader, index, comm)
        with comm.agreed(_PASSING), self._group.comm(comm) as group:
            if sharing is not None:
                pass_on(sharing, lambda row: acquire(row).detach(), group, reader.report)


def _fills_leaves(planner: LoadPlanner) -> bool:
    """Whether the destinations of a planner are the memory of leaves, which can be passed on."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        for name in ("acquire_tensor", "apply_tensor")
    )
