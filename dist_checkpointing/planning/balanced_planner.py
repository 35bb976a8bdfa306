"""The planner that lets every holder of a replica write a part of it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from dist_checkpointing.errors import CheckpointingException, Finding, InvalidShardingError
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedTensor
from dist_checkpointing.planning.balance import (
    HolderSets,
    Replicas,
    fixed_rows,
    rows_of_ranks,
    share_out,
    tensor_replicas,
)
from dist_checkpointing.planning.default import DefaultSavePlanner
from dist_checkpointing.planning.items import SavePlan
from dist_checkpointing.planning.layout import Layout, RowBlockLayout, index_of
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import Int64s, ShardTable

_WELL_BALANCED = 1.05
_MIN_CHUNK_BYTES = 2**18
_CHUNKS_A_RANK = 32
"""With chunks of a thirty-second of what a rank writes, ranks differ by no more than that."""


class BalancedSavePlanner(DefaultSavePlanner):
    """Writes every shard once, on whichever holder of a replica has the least to write so far.

    The replica ids stay what they are: who writes is only in the plan. A shard that is stored as
    several chunks may be written by several ranks, and where shards are too large for ranks to
    have alike, they are stored in smaller chunks (down to 256 KiB) than otherwise.

    Args:
        remove_redundancy: False leaves every shard to its main replica, as DefaultSavePlanner.
            It may also be given to ``configure_planner``.
        save_to_minimum_rank: True gives every shard to the lowest rank that holds it. It may also
            be given to ``configure_planner``.
        groups: number of the group of every rank; a shard stays in the group of its main replica.
            By default all ranks are one group.

    Example:
        >>> from dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
        >>> strategy = TensorStoreSaveShardedStrategy(planner=BalancedSavePlanner())
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, "ckpt", strategy)
    """

    def __init__(
        self,
        *,
        remove_redundancy: bool = True,
        save_to_minimum_rank: bool = False,
        groups: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.remove_redundancy = remove_redundancy
        self.save_to_minimum_rank = save_to_minimum_rank
        self.groups: tuple[int, ...] | None = None if groups is None else tuple(groups)

    @property
    def settings(self) -> Hashable | None:
        if type(self) is not BalancedSavePlanner:
            return None
        return self.remove_redundancy, self.save_to_minimum_rank, self.groups

    def within(self, groups: Sequence[int]) -> Self:
        """The same planner for ranks in these groups."""
        planner = copy.copy(self)
        planner.groups = tuple(groups)
        return planner

    def configure_planner(
        self,
        state_dict: Leaves,
        is_coordinator: bool = True,
        rank: int = 0,
        remove_redundancy: bool | None = None,
        save_to_minimum_rank: bool | None = None,
        *,
        layout: Layout | None = None,
    ) -> None:
        super().configure_planner(state_dict, is_coordinator, rank, layout=layout)
        if remove_redundancy is not None:
            self.remove_redundancy = remove_redundancy
        if save_to_minimum_rank is not None:
            self.save_to_minimum_rank = save_to_minimum_rank

    def build_local_plan(self) -> SavePlan:
        if self.remove_redundancy:
            check_replicas_have_data(self._leaves)
        return super().build_local_plan()

    def assign(self, catalog: ShardTable, num_ranks: int) -> tuple[ShardTable, Index]:
        if not self.remove_redundancy:
            return super().assign(catalog, num_ranks)
        found = tensor_replicas(catalog)
        shared = found.only(found.main_rows >= 0)
        groups = None
        if self.groups is not None:
            if len(self.groups) != num_ranks:
                finding = Finding(
                    "groups must have one number a rank", expected=num_ranks, found=len(self.groups)
                )
                raise CheckpointingException("the planner is for another world", [finding])
            groups = np.array(self.groups, dtype=np.int64)
        sets = HolderSets.of(catalog, shared, groups)
        written, index = self._assigned(catalog, shared, sets, num_ranks)
        return written.take(np.argsort(written.keys, kind="stable")), index

    def _assigned(
        self, catalog: ShardTable, shared: Replicas, sets: HolderSets, num_ranks: int
    ) -> tuple[ShardTable, Index]:
        is_fixed = fixed_rows(catalog, shared)
        fixed = catalog.take(is_fixed).of_ranks()
        firsts = shared.firsts
        both = np.concatenate([firsts, is_fixed])
        whole = catalog.take(both[np.argsort(catalog.keys[both], kind="stable")])

        def assigned(layout: Layout) -> tuple[ShardTable, Index, Int64s]:
            """What is written and by whom in this layout, and the bytes of each rank."""
            index = index_of(layout, catalog, whole)
            units, parts = layout.cut(catalog.take(firsts), index)
            order = np.argsort(parts, kind="stable")
            units, parts = units.take(order), parts[order]
            loads = np.zeros(num_ranks, dtype=np.int64)
            np.add.at(loads, fixed.ranks, fixed.num_bytes)
            own_sets = sets.of_part[parts]
            if self.save_to_minimum_rank:
                writers = sets.ranks[sets.starts[own_sets]]
            else:
                sizes = units.num_bytes
                writers = sets.ranks[share_out(sets.ranks, sets.starts, own_sets, sizes, loads)]
            rows = rows_of_ranks(catalog, shared, parts, writers)
            own = replace(
                units,
                ranks=writers,
                sources=catalog.sources[rows],
                main=catalog.main[rows],
                holders=None,
            )
            return own.followed_by(fixed), index, loads

        written, index, loads = assigned(self.layout)
        mean = loads.sum() / num_ranks
        finer = _finer(self.layout, mean)
        is_balanced = loads.max() <= _WELL_BALANCED * mean
        if finer is None or is_balanced or not (np.diff(sets.starts) > 1).any():
            return written, index
        other, other_index, other_loads = assigned(finer)
        return (other, other_index) if other_loads.max() < loads.max() else (written, index)


def _finer(layout: Layout, mean_bytes: float) -> RowBlockLayout | None:
    """A layout with which ranks can write equally much; None if it would be no finer."""
    if not isinstance(layout, RowBlockLayout):
        return None
    most = max(_MIN_CHUNK_BYTES, int(mean_bytes) // _CHUNKS_A_RANK)
    return replace(layout, max_chunk_bytes=most) if most < layout.max_chunk_bytes else None


def check_replicas_have_data(leaves: Sequence[ShardedBase]) -> None:
    """Any holder of a replica may become the one that writes it.

    Raises:
        InvalidShardingError: with every tensor that has no data.
    """
    findings = [
        Finding(
            "data is None, but every replica needs its data where any holder may write it",
            leaf.key,
            remedy="Give it its data, or leave this replica out of the state dict.",
        )
        for leaf in leaves
        if isinstance(leaf, ShardedTensor) and leaf.data is None
    ]
    if findings:
        raise InvalidShardingError("there is nothing to save for some shards", findings)
