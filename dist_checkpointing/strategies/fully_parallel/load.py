"""Load in parallel: what several ranks of a group want, one of them reads and passes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, get_args

import torch

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import Finding, StateMismatchError
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PlannedRemoval
from dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.planning import DefaultLoadPlanner, LoadPlan, LoadPlanner
from dist_checkpointing.storage.driver import read_plan
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.base import LoadShardedStrategy, PathOrStr
from dist_checkpointing.strategies.fully_parallel.group import GivenGroup, ParallelizationGroup
from dist_checkpointing.strategies.fully_parallel.passing import pass_on
from dist_checkpointing.strategies.fully_parallel.sharing import (
    Sharing,
    Wants,
    rows_of_shards,
    rows_of_table,
    share_reads,
)
from dist_checkpointing.strategies.planned import PlannedLoadStrategy
from dist_checkpointing.strategies.selection import handles_objects

MIN_SHARED_BYTES = 16 * 2**20
"""Sharing takes about 10 ms, however little is shared (two gloo ranks on one machine).

Two ranks that each read half of 16 MiB save that much time if a rank reads 1 GB/s, and more if it
reads less. From the page cache each rank was faster alone at any size.
"""

ExchangeAlgorithm = Literal["broadcast", "gather_object", "gather_rounds"]

_SHARING = "sharing out the reads"
_PASSING = "passing on what was read"


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
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

    @property
    def planner(self) -> Any:
        """The planner of the wrapped strategy, if it has one."""
        return getattr(self.base_strategy, "planner", None)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.base_strategy)

    def trusting(self) -> Self:
        wrapper = copy.copy(self)
        wrapper.base_strategy = self.base_strategy.trusting()
        return wrapper

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)

    def for_format(self, backend: str, version: int) -> LoadShardedStrategy:
        wrapper = copy.copy(self)
        wrapper.base_strategy = self.base_strategy.for_format(backend, version)
        return wrapper.resolved()

    def resolved(self) -> LoadShardedStrategy:
        """The wrapped strategy, set to share its reads; this wrapper if that is not planned."""
        if not isinstance(self.base_strategy, PlannedLoadStrategy):
            return self
        strategy = copy.copy(self.base_strategy)
        strategy.plan_reader = self._read_plan
        return strategy

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        resolved = self.resolved()
        if resolved is not self:
            return resolved.load(sharded_state_dict, checkpoint_dir)
        with self._group.comm(default_comm()) as comm:
            return self._load(sharded_state_dict, checkpoint_dir, comm)

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        return self.base_strategy.plan_removal(checkpoint_dir, key_prefix)

    def _share(self, describe: Callable[[], Any], comm: Comm, buffer_bytes: int) -> Sharing | None:
        """Who reads what; None if each reads for itself. Collective over the group ``comm``."""
        if comm.world_size == 1:
            return None

        def describe_own() -> bytes:
            return Wants(describe(), buffer_bytes, self._min_shared_bytes).pack()

        def share(packed: Sequence[bytes]) -> Sharing | None:
            return share_reads(list(map(Wants.unpack, packed)), comm.rank)

        return self._group.cache.work_out(comm, _SHARING, describe_own, share)

    def _read_plan(
        self, plan: LoadPlan, planner: LoadPlanner, reader: StorageReader, index: Index, comm: Comm
    ) -> None:
        """Read a share of the plan, and get the rest from other ranks. Collective.

        The arguments are those of ``read_plan``.
        """
        if comm.world_size == 1:
            read_plan(plan, planner, reader, index, comm)
            return
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

    def _load(
        self, state_dict: ShardedStateDict, checkpoint_dir: PathOrStr, comm: Comm
    ) -> StateDict:
        """Load with a strategy that is not made of a reader. Collective over the group ``comm``."""
        leaves, skeleton = flatten(state_dict)
        paths = [
            path
            for path, leaf in leaves.items()
            if isinstance(leaf, ShardedTensor) and _shape(leaf).numel()
        ]
        shards: list[Any] = [leaves[path] for path in paths]
        sharing = self._share(lambda: rows_of_shards(shards), comm, StorageOptions().buffer_bytes)
        if sharing is None:
            return self.base_strategy.load(state_dict, checkpoint_dir)
        with comm.agreed("reading"):
            read_by_others = set(paths) - {paths[row] for row in sharing.own.tolist()}
            values: dict[Any, Any] = {}
            for path in read_by_others:
                # A copy, so that memory made here does not appear in the caller's leaves.
                leaf: Any = copy.copy(leaves[path])
                leaf.init_data("cpu")
                values[path] = leaf.data
            # The strategy needs no paths of the state dict.
            asked = {str(n): leaves[p] for n, p in enumerate(leaves) if p not in read_by_others}
            read = self.base_strategy.load(asked, checkpoint_dir)
            values |= {p: read[str(n)] for n, p in enumerate(leaves) if str(n) in asked}
            _check_read([(leaves[paths[row]], values[paths[row]]) for row in sharing.own.tolist()])
        pass_on(sharing, lambda row: values[paths[row]].detach(), comm, lambda _: None)
        result: StateDict = unflatten(skeleton, values)
        return result


def _fills_leaves(planner: LoadPlanner) -> bool:
    """Whether the destinations of a planner are the memory of leaves, which can be passed on."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), name) is getattr(DefaultLoadPlanner, name)
        for name in ("acquire_tensor", "apply_tensor")
    )


def _shape(leaf: ShardedTensor) -> torch.Size:
    """The shape of a leaf's memory."""
    flat = leaf.flat_range
    return torch.Size(leaf.local_shape if flat is None else (flat[1] - flat[0],))


def _check_read(read: Sequence[tuple[Any, Any]]) -> None:
    """Refuse values that have another shape or dtype than the leaves that were asked for."""
    findings = [
        Finding(
            "the strategy returned something else than it was asked for",
            leaf.key,
            expected=(leaf.dtype, tuple(_shape(leaf))),
            found=(getattr(value, "dtype", type(value).__name__), getattr(value, "shape", "")),
        )
        for leaf, value in read
        if not isinstance(value, torch.Tensor)
        or (value.shape, value.dtype) != (_shape(leaf), leaf.dtype)
    ]
    if findings:
        raise StateMismatchError("what was read cannot be passed on", findings)
