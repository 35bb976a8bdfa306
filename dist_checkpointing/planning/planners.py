"""The planner protocol: who writes and who reads what, open to users.

A planner sees the leaves of its rank and answers for them; it never touches storage. Subclass the
default planners to rename, skip or convert, and pass the planner to a strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ClassVar

import torch

from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.mapping.nesting import Path
from dist_checkpointing.planning.items import SavePlan, WriteItem
from dist_checkpointing.planning.layout import Layout
from dist_checkpointing.planning.read_table import LoadPlan, ReadItem

Leaves = Mapping[Path, ShardedBase]
"""A flattened sharded state dict: path -> ShardedTensor or ShardedObject."""


class SavePlanner(ABC):
    """Decides what is written, by whom, under which names.

    Called in this order on every rank: ``configure_planner``, ``build_local_plan``,
    ``build_global_plan``, ``finalize_plan``, then ``get_data`` once an item. A save that uses an
    earlier plan again calls ``configure_planner`` and ``get_data`` only.
    """

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
    def configure_planner(
        self, state_dict: Leaves, *, is_coordinator: bool, rank: int, layout: Layout
    ) -> None:
        """Take the leaves of this rank, and the layout that the storage asks for."""

    @abstractmethod
    def build_local_plan(self) -> SavePlan:
        """What this rank holds, replicas included."""

    @abstractmethod
    def build_global_plan(self, all_plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Index]:
        """Who writes what, and what the checkpoint then holds.

        Called on every rank with the same local plans (in rank order), and must give the same
        answer everywhere. Must not depend on the leaves of this rank.
        """

    @abstractmethod
    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, cut into the items that are stored."""

    @abstractmethod
    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        """The data of an item: a tensor of its shape (any device, may be a view) or an object."""

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
        is_own_memory: whether tensors need only be filled, and nobody else is told.
    """

    is_own_memory: ClassVar[bool] = False

    def __init__(self, planner: LoadPlanner, plan: LoadPlan) -> None:
        self.planner = planner
        self.plan = plan

    def acquire(self, row: int) -> torch.Tensor:
        """The destination of a row, as a writable view of the shape of its box."""
        return self.planner.acquire_tensor(self.plan.items[row])

    def filled(self, row: int, destination: torch.Tensor) -> None:
        """To be called when what ``acquire`` gave has been filled in place."""
        self.planner.apply_tensor(self.plan.items[row], destination)

    def apply_bytes(self, row: int, value: object) -> None:
        """Put a loaded object where the row belongs."""
        self.planner.apply_bytes(self.plan.items[row], value)


class LoadPlanner(ABC):
    """Decides what is read and where it goes.

    Called in this order on every rank: ``configure_planner``, ``build_local_plan``,
    ``build_global_plan``, ``finalize_plan``, then ``acquire_tensor`` and ``apply_tensor`` (or
    ``apply_bytes``) once an item. An item that cannot be filled in place, because it goes to
    another device or dtype, may come in parts, blocks of its rows that are items themselves, so
    that a reader never has more of it in memory than its buffers.
    """

    @abstractmethod
    def configure_planner(
        self, state_dict: Leaves, metadata: Index, *, is_coordinator: bool, rank: int
    ) -> None:
        """Take the leaves of this rank, all with memory to fill, and what the checkpoint holds."""

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
    def apply_bytes(self, item: ReadItem, value: object) -> None:
        """Put a loaded object where the item belongs."""

    def destinations(self, plan: LoadPlan) -> Destinations:
        """Where the rows of a plan go, for a reader that works on rows.

        There is no need to override this: it asks the methods above for the row's item.
        """
        return Destinations(self, plan)
