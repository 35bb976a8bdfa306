"""The planner protocol: who writes and who reads what, open to users.

A planner sees the leaves of its rank and answers for them; it never touches storage. Subclass the
default planners to rename, skip or convert, and pass the planner to a strategy.
"""

from __future__ import annotations

import inspect
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from dist_checkpointing.errors import Finding, UnsupportedFormatError
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.mapping.nested_dicts import Path
from dist_checkpointing.planning.items import SavePlan, WriteItem, WriteItemType
from dist_checkpointing.planning.layout import Layout, RowBlockLayout
from dist_checkpointing.planning.read_items import ReadItem
from dist_checkpointing.planning.read_table import LoadPlan
from dist_checkpointing.planning.shard_table import Int64s

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
                attribute), ``remove_redundancy`` and ``save_to_minimum_rank`` (see
                BalancedSavePlanner; the planner's own, if it has such attributes).
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
            return _stream(data)
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

    Several threads may ask.

    Args:
        planner: answers for the items.
        plan: whose rows they are.

    Attributes:
        is_own_memory: Whether tensors need only be filled, and nobody else is told.
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

        What lies there may be overwritten without a word to the planner.

        Args:
            dtypes: Stored dtypes.
            numbers: Dtype of each row, as a position in ``dtypes``.

        Returns:
            One address a row, -1 for a row that must be asked for; None if all must.
        """
        del dtypes, numbers
        return None

    def apply_bytes(self, row: int, value: object) -> None:
        """Put a loaded object where the row belongs."""
        item, planner = self.plan.items[row], self.planner
        if type(planner).load_bytes is not LoadPlanner.load_bytes:
            planner.load_bytes(item, _stream(value))
        else:
            planner.apply_bytes(item, _stream(value) if _wants_bytes(planner) else value)


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

        A method whose ``value`` is annotated as bytes or a stream gets an ``io.BytesIO`` with what
        ``torch.save`` makes of the object.
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
        if _wants_bytes(self):
            self.apply_bytes(item, value)
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


def _stream(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _wants_bytes(planner: LoadPlanner) -> bool:
    """Whether the planner's ``apply_bytes`` says that it takes bytes and not objects."""
    *_, value = inspect.signature(planner.apply_bytes).parameters.values()
    said = value.annotation
    name = said if isinstance(said, str) else getattr(said, "__name__", str(said))
    return name.rpartition(".")[2] in ("bytes", "BytesIO", "BinaryIO", "IO", "IO[bytes]")
