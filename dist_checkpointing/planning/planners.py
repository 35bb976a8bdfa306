"""SavePlanner and LoadPlanner, the protocol, with the default ones that users subclass.

A planner sees the leaves of its rank and answers for them; it never touches storage. Subclass the
default planners to rename, skip or convert, and pass the planner to a strategy.
"""

from __future__ import annotations

import inspect
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.format.geometry import Box, Ints, Window, ravel_offset
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import Path
from dist_checkpointing.planning.chunking import Layout, RowBlockLayout, index_of
from dist_checkpointing.planning.coverage import main_rows
from dist_checkpointing.planning.items import ReadItem, SavePlan, WriteItem, WriteItemType
from dist_checkpointing.planning.load_plan import (
    LoadPlan,
    WantedTable,
    contiguous_ranges,
    misfits,
    object_rows,
)
from dist_checkpointing.planning.resharding import plan_load
from dist_checkpointing.planning.shard_table import Int64s, ShardTable, concatenate, describe
from dist_checkpointing.planning.user_planner import overrides

_STREAMS = dict.fromkeys(("BytesIO", "BinaryIO", "IO", "IO[bytes]"), io.BytesIO)
Leaves = Mapping[Path, ShardedBase]
"""A flattened sharded state dict: path -> ShardedTensor or ShardedObject."""


class SavePlanner(ABC):
    """Decides what is written, by whom, under which names.

    Called in this order on every rank: ``configure_planner``, ``build_local_plan``,
    ``build_global_plan``, ``finalize_plan``, then ``get_data`` once an item. A save that uses an
    earlier plan again calls ``configure_planner`` and ``get_data`` only.

    Attributes:
        layout: How the storage wants tensors cut up; set before ``configure_planner``.
    """

    layout: Layout = RowBlockLayout()

    @property
    def settings(self) -> Hashable | None:
        """What the plans of this planner depend on besides the leaves and the layout.

        None (the default): on anything, so that a plan is never used again.
        """
        return None

    @property
    def makes_data(self) -> bool:
        """Whether ``get_data`` makes new tensors, read or converted when they are asked for.

        A writer counts the memory of such tensors as its own buffers.
        """
        return False

    @abstractmethod
    def configure_planner(self, state_dict: Leaves, *args: Any, **kwargs: Any) -> None:
        """Take the leaves of this rank.

        Args:
            state_dict: the leaves.
            args: nothing.
            kwargs: those that the method has names for, or all if it takes any keyword, of
                ``is_coordinator`` (whether this is rank 0), ``rank``, ``layout`` (as the
                attribute), ``remove_redundancy`` and ``save_to_minimum_rank`` (the planner's own,
                if it has such attributes; else True and False).
        """

    @abstractmethod
    def build_local_plan(self) -> SavePlan:
        """What this rank holds, replicas included."""

    @abstractmethod
    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Index]:
        """Who writes what, and what the checkpoint then holds.

        Called on every rank with the same local plans (in rank order), and must give the same
        answer everywhere. Must not depend on the leaves of this rank.

        The planner may cut tensors up by ``layout`` and return the Index that follows from that.
        Or it returns a Metadata: then every item becomes one stored chunk.
        """

    @abstractmethod
    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, cut into the items that are stored."""

    @abstractmethod
    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        """The data of an item: a tensor of its shape (any device, may be a view) or an object."""

    def resolve_data(self, item: WriteItem) -> Any:
        """The same as torch DCP asks for it: a detached tensor, or a stream of ``torch.save``."""
        data = self.get_data(item)
        if item.type is WriteItemType.BYTE_IO:
            return saved_stream(data)
        assert isinstance(data, torch.Tensor)
        return data.detach()

    def data_of(self, plan: SavePlan) -> Callable[[int], torch.Tensor | object]:
        """What gives the data of each row of a plan, to a writer that works on rows.

        Several threads may call it. Each row is asked for when its data is needed: once, or twice
        in a save with a base. There is no need to override this: it asks ``get_data`` for the row's
        item.
        """
        items = plan.items
        return lambda row: self.get_data(items[row])


class Destinations:
    """Where the rows of a plan go, for a reader that works on rows: a planner is asked for each.

    Several threads may ask. Where ``is_own_memory``, tensors need only be filled.
    """

    is_own_memory: ClassVar[bool] = False

    def __init__(self, planner: LoadPlanner, plan: LoadPlan) -> None:
        self.planner = planner
        self.plan = plan

    def acquire(self, row: int) -> torch.Tensor:
        """The destination of a row, as a writable view of the shape of its box."""
        return self.planner.resolve_tensor(self.plan.items[row])

    def filled(self, row: int, destination: torch.Tensor) -> None:
        """To be called when what ``acquire`` gave has been filled in place."""
        self.planner.commit_tensor(self.plan.items[row], destination)

    def addresses(self, dtypes: Sequence[torch.dtype | None], numbers: Int64s) -> Int64s | None:
        """Address of the first byte of what each row fills, where that is a run of CPU memory.

        What lies there may be overwritten without a word to the planner. ``dtypes`` are those that
        are stored, and ``numbers`` the position of each row's in them. The address is -1 for a row
        that must be asked for; None if all must.
        """
        del dtypes, numbers
        return None

    def apply_bytes(self, row: int, value: object) -> None:
        """Put a loaded object where the row belongs."""
        item, planner = self.plan.items[row], self.planner
        is_own = type(planner).load_bytes is not LoadPlanner.load_bytes
        # Bytes need not become bytes.
        if not is_own and _kind_of_bytes(planner) in (None, type(value)):
            planner.apply_bytes(item, value)
        else:
            planner.load_bytes(item, saved_stream(value))


class LoadPlanner(ABC):
    """Decides what is read and where it goes.

    Called in this order on every rank: ``configure_planner``, ``build_local_plan``,
    ``build_global_plan``, ``finalize_plan``, then ``acquire_tensor`` and ``apply_tensor`` (or
    ``apply_bytes``) once an item. ``resolve_tensor``, ``commit_tensor`` and ``load_bytes`` are the
    same by the names of torch DCP, for readers and planners that are written to its protocol. An
    item that cannot be filled in place, because it goes to another device or dtype, may come in
    parts, blocks of its rows that are items themselves, so that a reader never has more of it in
    memory than its buffers.
    """

    @abstractmethod
    def configure_planner(
        self, state_dict: Leaves, metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Take the leaves of this rank, and what the checkpoint holds.

        Args:
            state_dict: the leaves, all with memory to fill.
            metadata: what the checkpoint holds: a Metadata, which is an Index too.
            args: nothing.
            kwargs: those that the method has names for, or both if it takes any keyword, of
                ``is_coordinator`` (whether this is rank 0) and ``rank``.
        """

    @abstractmethod
    def build_local_plan(self) -> LoadPlan:
        """What this rank needs.

        Raises:
            StateMismatchError: with every part that the checkpoint does not have.
        """

    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """Change the plans of all ranks together. Only an overridden one is ever called."""
        return list(all_plans)

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """Last change to this rank's plan."""
        return plan

    @abstractmethod
    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        """The destination of an item, as a writable view of its shape."""

    @abstractmethod
    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Put ``tensor`` where the item belongs; nothing to do if it is that memory already."""

    @abstractmethod
    def apply_bytes(self, item: ReadItem, value: Any) -> None:
        """Put a loaded object where the item belongs.

        A method whose ``value`` is annotated as a stream gets an ``io.BytesIO`` with what
        ``torch.save`` makes of the object; one that is annotated as ``bytes`` gets these bytes, or
        the object itself if that is bytes.
        """

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """The same as ``acquire_tensor``."""
        return self.acquire_tensor(item)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """The same as ``apply_tensor``."""
        self.apply_tensor(item, tensor)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Put what ``torch.save`` made of an object where the item belongs.

        If it is overridden, it gets all objects, instead of ``apply_bytes``.

        Raises:
            UnsupportedFormatError: if there is more in it than ``torch.load`` reads without trust.
        """
        kind = _kind_of_bytes(self)
        if kind is not None:
            self.apply_bytes(item, value.read() if kind is bytes else value)
            return
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            finding = Finding(
                f"cannot be unpickled without trust: {error}",
                item.dest_index.fqn,
                remedy="Override load_bytes in the planner to unpickle it.",
            )
            raise UnsupportedFormatError("an object cannot be loaded", [finding]) from error
        self.apply_bytes(item, loaded)

    def destinations(self, plan: LoadPlan) -> Destinations:
        """Where the rows of a plan go, for a reader that works on rows.

        There is no need to override this: it asks the methods above for the row's item.
        """
        return Destinations(self, plan)


def saved_stream(value: object) -> io.BytesIO:
    """What ``torch.save`` makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _kind_of_bytes(planner: LoadPlanner) -> type | None:
    """What the planner's ``apply_bytes`` says that it takes, if that is bytes or a stream."""
    *_, value = inspect.signature(planner.apply_bytes).parameters.values()
    said = value.annotation
    name = said if isinstance(said, str) else getattr(said, "__name__", str(said))
    name = name.rpartition(".")[2]
    return bytes if name == "bytes" else _STREAMS.get(name)


class DefaultSavePlanner(SavePlanner):
    """Writes the main replica of every shard that has elements, on the rank that holds it.

    Example:
        >>> from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
        >>> class Rounded(DefaultSavePlanner):
        ...     def get_data(self, item):
        ...         return super().get_data(item).round()
        ...
        >>> strategy = TensorStoreSaveShardedStrategy(planner=Rounded())
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt", strategy)
    """

    def __init__(self) -> None:
        self._leaves: list[ShardedBase] = []
        self._by_key: dict[str, list[ShardedBase]] | None = None
        self._rank = 0

    @property
    def settings(self) -> Hashable | None:
        # A subclass may do anything, and says itself when its plans can be used again.
        return () if type(self) is DefaultSavePlanner else None

    # Subclasses of users may name any of the parameters, and no others.
    def configure_planner(self, state_dict: Leaves, *args: Any, **kwargs: Any) -> None:
        self._configure(state_dict, *args, **kwargs)

    def _configure(
        self,
        state_dict: Leaves,
        is_coordinator: bool = True,
        rank: int = 0,
        remove_redundancy: bool = True,
        save_to_minimum_rank: bool = False,
        *,
        layout: Layout | None = None,
    ) -> None:
        # Every shard is written once anyway.
        del is_coordinator, remove_redundancy
        if save_to_minimum_rank:
            problem = "no shard is given to the lowest rank that holds it"
            remedy = "Leave it out, or use BalancedSavePlanner, which chooses among the holders."
            finding = Finding(problem, found="save_to_minimum_rank=True", remedy=remedy)
            raise CheckpointingException("the planner cannot choose who writes", [finding])
        self._leaves = list(state_dict.values())
        self._by_key = None
        self._rank = rank
        if layout is not None:
            self.layout = layout

    def build_local_plan(self) -> SavePlan:
        return SavePlan(describe(self._leaves, self._rank))

    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Index]:
        """See ``assign``, which a save calls instead unless a subclass overrides this."""
        catalog = concatenate([plan.table for plan in all_plans])
        written, index = self.assign(catalog, len(all_plans))
        ordered = written.take(np.argsort(written.ranks, kind="stable"))
        bounds = np.searchsorted(ordered.ranks, np.arange(len(all_plans) + 1)).tolist()
        return [
            replace(plan, table=ordered.take(slice(*bounds[rank : rank + 2])), index=index)
            for rank, plan in enumerate(all_plans)
        ], index

    def assign(self, catalog: ShardTable, num_ranks: int) -> tuple[ShardTable, Index]:
        """Who writes what, and what the checkpoint then holds, from what all ranks hold.

        Args:
            catalog: the shards of all ranks, sorted by key.
            num_ranks: number of ranks.

        Returns:
            The rows that are written with the ranks that write them, sorted by key; the index.
        """
        del num_ranks
        written = main_rows(catalog)
        return written, index_of(self.layout, catalog, written)

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        assert plan.index is not None
        table, _ = self.layout.cut(plan.table, plan.index)
        return replace(plan, table=table)

    def data_of(self, plan: SavePlan) -> Callable[[int], torch.Tensor | object]:
        table, leaves = plan.table, self._leaves
        if overrides(self, DefaultSavePlanner, "get_data") or (table.sources < 0).any():
            return super().data_of(plan)
        sources, sizes = table.sources.tolist(), table.num_elements.tolist()
        is_flat = (table.flat[:, 0] >= 0).tolist()

        def data(row: int) -> torch.Tensor | object:
            leaf = leaves[sources[row]]
            whole: object = leaf.data
            # What has as many elements as the whole is the whole.
            if isinstance(leaf, ShardedTensor) and (
                leaf.cast_by
                or leaf.prepend_axis_num
                or leaf.data is None
                or leaf.data.numel() != sizes[row]
                or (leaf.flattened_range is not None and not is_flat[row])
            ):
                return _values(leaf, table.box(row), table.flat_range(row))
            return whole

        return data

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        leaf, part = self._leaf_of(item), item.tensor_data
        if isinstance(leaf, ShardedTensor) and part is not None:
            return _values(leaf, part.chunk, part.flat_range)
        value: object = leaf.data
        return value

    def _leaf_of(self, item: WriteItem) -> ShardedBase:
        if item.index.index is not None:
            return self._leaves[item.index.index]
        if self._by_key is None:
            self._by_key = {}
            for leaf in self._leaves:
                self._by_key.setdefault(leaf.key, []).append(leaf)
        for leaf in self._by_key.get(item.index.fqn, ()):
            if _holds(leaf, item):
                return leaf
        problem = "no leaf of this rank holds this item"
        remedy = "Name the leaf in index.index, or override get_data."
        seen = f"{item.type.value} at {item.index.offset}"
        finding = Finding(problem, item.index.fqn, found=seen, remedy=remedy)
        raise InvalidShardingError("the planner has no data for an item", [finding])


def _holds(leaf: ShardedBase, item: WriteItem) -> bool:
    """Whether an item that does not name its leaf is a part of this one."""
    part = item.tensor_data
    if part is None:
        return isinstance(leaf, ShardedObject) and item.index.offset == leaf.global_offset
    if not isinstance(leaf, ShardedTensor) or not leaf.box.contains(part.chunk):
        return False
    if leaf.flat_range is None:
        return part.flat_range is None
    (begin, end), (start, stop) = leaf.flat_range, _range_of(part.chunk, part.flat_range, leaf)
    return begin <= start and stop <= end


def _range_of(box: Box, flat: tuple[int, int] | None, leaf: ShardedTensor) -> tuple[int, int]:
    """Which elements of a flattened leaf's box a part is: a range, or a box that is one."""
    if flat is not None:
        return flat
    start = ravel_offset(box.relative_to(leaf.box.offset).offset, leaf.box.shape)
    return start, start + box.num_elements


def _values(leaf: ShardedTensor, box: Box, flat: tuple[int, int] | None) -> torch.Tensor:
    """The values of a leaf in a box, or in a flattened range of it."""
    if leaf.flattened_range is None:
        place = Window(0, leaf.box.shape, box.relative_to(leaf.box.offset))
    else:
        start, stop = _range_of(box, flat, leaf)
        shape = box.shape if flat is None else (stop - start,)
        place = Window(start - leaf.flattened_range.start, shape, Box.whole(shape))
    values = _memory(leaf, place)
    return values.to(leaf.dtype) if leaf.cast_by == "planner" else values


def _memory(leaf: ShardedTensor, place: Window) -> torch.Tensor:
    assert leaf.data is not None
    whole = leaf.data.detach() if leaf.data.requires_grad else leaf.data
    if leaf.flattened_range is not None:
        whole = whole[place.start : place.start + place.array_size].view(place.shape)
    elif leaf.prepend_axis_num:
        whole = whole[(None,) * leaf.prepend_axis_num]
    return whole if place.box.shape == whole.shape else whole[place.box.slices()]


class DefaultLoadPlanner(LoadPlanner):
    """Fills every wanted shard from the stored chunks that meet it.

    Example:
        >>> from dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
        >>> class Halved(DefaultLoadPlanner):
        ...     def apply_tensor(self, item, tensor):
        ...         super().apply_tensor(item, tensor / 2)
        ...
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt")
        >>> strategy = TensorStoreLoadShardedStrategy(planner=Halved())
    """

    _wanted = WantedTable({})
    _index = Index.of([])

    @property
    def leaves(self) -> Sequence[ShardedBase]:
        """What is filled; the ``sources`` of a plan are positions in it."""
        return self._wanted.rows

    def configure_planner(
        self, state_dict: Any, metadata: Index, *args: Any, **kwargs: Any
    ) -> None:
        del args, kwargs
        if not isinstance(state_dict, WantedTable):
            state_dict = WantedTable(state_dict)
        self._wanted = state_dict
        self._index = metadata

    def build_local_plan(self) -> LoadPlan:
        wanted = stored = self._wanted
        findings: list[Finding] = []
        is_stored = self._index.rows_of(wanted.keys) >= 0
        if not is_stored.all():
            absent = np.flatnonzero(~is_stored).tolist()
            findings += [Finding("not in the checkpoint", wanted.keys[row]) for row in absent]
            stored = WantedTable.of(leaf for leaf in wanted.tensors if leaf.key in self._index)
        cells: list[tuple[str, Ints, int]] = []
        if len(wanted) < len(wanted.rows):
            for source, leaf in enumerate(wanted.rows):
                if isinstance(leaf, ShardedObject):
                    findings += misfits(leaf, self._index)
                    cells.append((leaf.key, tuple(leaf.global_offset), source))
        table, uncovered = plan_load(self._index, stored)
        findings += uncovered
        StateMismatchError.raise_if(findings, "the checkpoint does not hold what is wanted")
        return LoadPlan(table.followed_by(object_rows(cells)) if cells else table)

    def destinations(self, plan: LoadPlan) -> Destinations:
        tensors = ("acquire_tensor", "apply_tensor", "resolve_tensor", "commit_tensor")
        if overrides(self, DefaultLoadPlanner, *tensors, "apply_bytes", "load_bytes"):
            return super().destinations(plan)
        return _OwnMemory(self, plan, self._wanted)

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        return _memory(self._leaf(item), item.dest)

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        whole = self._leaf(item).data
        if whole.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            self.acquire_tensor(item).copy_(tensor)

    def apply_bytes(self, item: ReadItem, value: Any) -> None:
        self._leaf(item).data = value

    def _leaf(self, item: ReadItem) -> Any:
        assert item.dest_index.index is not None
        return self._wanted.rows[item.dest_index.index]


class _OwnMemory(Destinations):
    """The memory of leaves, handed out without items where a row fills a whole leaf."""

    is_own_memory = True

    def __init__(self, planner: DefaultLoadPlanner, plan: LoadPlan, wanted: WantedTable) -> None:
        super().__init__(planner, plan)
        self._wanted = wanted
        self._table = table = plan.table
        self._sources, self._sizes = table.sources, table.num_elements

    def acquire(self, row: int) -> torch.Tensor:
        leaf: Any = self._wanted.rows[int(self._sources[row])]
        data: torch.Tensor = leaf.data
        # What has as many elements as the whole is the whole; a flattened one has another shape.
        is_whole = data.numel() == self._sizes[row] and leaf.flattened_range is None
        if not is_whole or leaf.prepend_axis_num:
            return _memory(leaf, self._table.dest(row))
        return data.detach() if data.requires_grad else data

    def filled(self, row: int, destination: torch.Tensor) -> None:
        """Nothing is left to do: the destination is the leaf's own memory."""

    def addresses(self, dtypes: Sequence[torch.dtype | None], numbers: Int64s) -> Int64s | None:
        table, own = self._table, self._wanted
        if table.given is not None or not len(own):
            return None  # a planner of a user may have changed what the rows mean
        number = {dtype: i for i, dtype in enumerate(dtypes)}
        own_numbers = np.array([number.get(dtype, -1) for dtype in own.data_dtypes])
        sizes = np.array([0 if dtype is None else dtype.itemsize for dtype in dtypes])[numbers]
        # The position of a leaf among the tensors; no row of a tensor has that of an object.
        position = np.zeros(len(own.rows), dtype=np.int64)
        position[own.sources] = np.arange(len(own))
        rows = position[table.sources]
        starts, is_run = contiguous_ranges(
            table.dest_starts, table.dest_shapes, table.dest_boxes, table.lengths
        )
        ends = (table.dest_starts + table.dest_shapes.prod(axis=1)) * sizes
        bytes_of_rows, is_flat = own.num_bytes[rows], own.flat[rows, 0] >= 0
        fits = np.where(is_flat, ends <= bytes_of_rows, ends == bytes_of_rows)
        fits &= is_run & ~table.is_object & (own_numbers[rows] == numbers)
        fits &= own.addresses[rows] >= 0
        return np.where(fits, own.addresses[rows] + starts * sizes, -1)

    def apply_bytes(self, row: int, value: object) -> None:
        self._wanted.rows[int(self._sources[row])].data = value
