"""Load in parallel: each byte that ranks of a group want alike is read by one of them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Self

import torch

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.removal import PlannedRemoval
from dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from dist_checkpointing.mapping.nesting import flatten, unflatten
from dist_checkpointing.planning.describe import describe
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.protocol import StorageReader
from dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    PathOrStr,
    PlannedLoadStrategy,
)
from dist_checkpointing.strategies.fully_parallel.agreed_cache import AgreedCache
from dist_checkpointing.strategies.fully_parallel.group import GivenGroup, ParallelizationGroup
from dist_checkpointing.strategies.fully_parallel.memory import (
    as_read,
    fill_doubles,
    own_share,
    with_memory,
)
from dist_checkpointing.strategies.fully_parallel.passing import (
    EXCHANGE_ALGORITHMS,
    ExchangeAlgorithm,
    pass_on,
)
from dist_checkpointing.strategies.fully_parallel.sharing import (
    Cut,
    Sharing,
    along_chunks,
    share_reads,
    whole_part,
)
from dist_checkpointing.strategies.selection import handles_objects

MIN_SHARED_BYTES = 16 * 2**20
"""To share takes about 10 ms more, however little is shared (two gloo ranks on one machine).

Ranks that each read half of 16 MiB save as much where one reads 1 GB/s, and more where less.
From the page cache each was faster alone at any size, which no threshold makes up for.
"""
_STEP = "sharing out the reads"

Facts = tuple[int, int, str, str]


class SharedReads:
    """How the ranks of a group share their reads.

    Args:
        group: the ranks; None: those that load together.
        keeps: whether the answer is used again while no rank wants anything else.
        algorithm: how what was read is passed on.
        min_shared_bytes: with fewer bytes that several ranks want, each reads for itself.
    """

    def __init__(
        self,
        group: GivenGroup,
        *,
        keeps: bool,
        algorithm: ExchangeAlgorithm,
        min_shared_bytes: int,
    ) -> None:
        self.group = ParallelizationGroup(group, keeps=keeps)
        self._algorithm = algorithm
        self._min_shared_bytes = min_shared_bytes
        self._cache: AgreedCache[Sharing | None] = AgreedCache(keeps=keeps)

    @property
    def sharing(self) -> Sharing | None:
        """What is kept, if anything."""
        return self._cache.value

    def plan(
        self, leaves: Leaves, comm: Comm, buffer_bytes: int, cut: Cut, cuts: str
    ) -> Sharing | None:
        """Who reads what; None if each reads for itself. Collective over the group ``comm``.

        Args:
            leaves: what this rank wants.
            comm: the group.
            buffer_bytes: memory that passing on may take on this rank.
            cut: how a part may be cut up.
            cuts: tells ``cut`` from others.
        """
        if comm.world_size == 1:
            return None

        def describe_own() -> tuple[ShardTable, Facts]:
            facts = (buffer_bytes, self._min_shared_bytes, self._algorithm, cuts)
            return describe(list(leaves.values()), comm.rank), facts

        def work_out(brought: list[tuple[ShardTable, Facts]]) -> Sharing | None:
            algorithms = sorted({facts[2] for _, facts in brought})
            if len(algorithms) > 1:
                problem = "all ranks of a group need the same exchange_algo"
                raise CheckpointingException(problem, [Finding(problem, found=algorithms)])
            # What a message takes: one's own, those of all ranks, and these once more as objects.
            buffers = {
                "broadcast": 1,
                "gather_rounds": comm.world_size + 2,
                "gather_object": 2 * comm.world_size + 4,
            }[self._algorithm]
            return share_reads(
                [table for table, _ in brought],
                comm.rank,
                cut,
                min_shared_bytes=max(facts[1] for _, facts in brought),
                message_bytes=max(1, min(facts[0] for _, facts in brought) // buffers),
            )

        return self._cache.get(comm, _STEP, describe_own, work_out)

    def pass_on(
        self,
        sharing: Sharing,
        arrays: Mapping[int, torch.Tensor],
        comm: Comm,
        report: Callable[[int], None],
    ) -> None:
        """Fill the arrays of all units that other ranks have read. Collective over ``comm``."""
        pass_on(sharing, arrays, comm, self._algorithm, report)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Loads with another strategy, each byte read by one rank of a group and passed on to others.

    What is loaded is the same as without it. Tensors are filled in place. Every rank reads its own
    sharded objects, which are small. Worth it where reading is slower than the network between the
    ranks, such as a shared file system that many replicas read from.

    Args:
        strategy: does the reading.
        parallelization_group: the ranks that share their reads, this one included. By default all.
        do_cache_distribution: keep who reads what, and share out again only when some rank of the
            group wants something else, which all of them find out together. The same on all ranks.
        exchange_algo: how what was read is passed on. ``"broadcast"`` from the reader to all, with
            no copy where it can be; ``"gather_rounds"`` one tensor of every rank at a time;
            ``"gather_object"`` the same as pickled bytes. The result is the same.
        min_shared_bytes: where the ranks of a group want fewer bytes than that alike, each reads
            for itself.

    Raises:
        ValueError: for an exchange_algo that does not exist.
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
        if exchange_algo not in EXCHANGE_ALGORITHMS:
            known = ", ".join(map(repr, EXCHANGE_ALGORITHMS))
            raise ValueError(f"exchange_algo must be one of {known}, not {exchange_algo!r}")
        self.base_strategy = strategy
        self._reads = SharedReads(
            parallelization_group,
            keeps=do_cache_distribution,
            algorithm=exchange_algo,
            min_shared_bytes=min_shared_bytes,
        )

    @property
    def cached_distribution(self) -> Sharing | None:
        """Who reads what, if that is kept."""
        return self._reads.sharing

    @property
    def planner(self) -> Any:
        """The planner of the wrapped strategy's own, if it has one."""
        return getattr(self.base_strategy, "planner", None)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self.base_strategy)

    def trusting(self) -> Self:
        return self._round(self.base_strategy.trusting())

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)

    def for_format(self, backend: str, version: int) -> LoadShardedStrategy:
        base = self.base_strategy.for_format(backend, version)
        if isinstance(base, PlannedLoadStrategy):
            return _PlannedParallelLoad(base, self._reads)
        return self._round(base)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: PathOrStr) -> StateDict:
        base = self.base_strategy
        if isinstance(base, PlannedLoadStrategy):
            return _PlannedParallelLoad(base, self._reads).load(sharded_state_dict, checkpoint_dir)
        with self._reads.group.meeting(default_comm()) as comm:
            return self._load_shared(sharded_state_dict, checkpoint_dir, comm)

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        return self.base_strategy.plan_removal(checkpoint_dir, key_prefix)

    def _load_shared(
        self, state_dict: ShardedStateDict, checkpoint_dir: PathOrStr, comm: Comm
    ) -> StateDict:
        leaves, skeleton = flatten(state_dict)
        sharing = self._reads.plan(
            leaves, comm, StorageOptions().buffer_bytes, whole_part, cuts="none"
        )
        if sharing is None:
            return self.base_strategy.load(state_dict, checkpoint_dir)
        with comm.agreed("reading"):
            wanted = with_memory(leaves, sharing, comm.rank)
            own, arrays = own_share(wanted, sharing, comm.rank)
            # Where they stood in the state dict means nothing to the strategy.
            names = {path: str(number) for number, path in enumerate(own)}
            asked = {names[path]: leaf for path, leaf in own.items()}
            read = self.base_strategy.load(asked, checkpoint_dir)
            values = {path: leaf.data for path, leaf in wanted.items()}
            values |= {path: read[name] for path, name in names.items()}
            arrays |= as_read(list(wanted), wanted, values, sharing, comm.rank)
        self._reads.pass_on(sharing, arrays, comm, lambda _: None)
        with comm.agreed("passing on what was read"):
            fill_doubles(wanted, sharing, arrays)
        result: StateDict = unflatten(skeleton, values)
        return result

    def _round(self, base: LoadShardedStrategy) -> Self:
        wrapper = copy.copy(self)
        wrapper.base_strategy = base
        return wrapper


class _PlannedParallelLoad(PlannedLoadStrategy):
    """A planned strategy. Each rank reads its share; all else is the strategy's."""

    def __init__(self, base: PlannedLoadStrategy, reads: SharedReads) -> None:
        super().__init__(planner=base.planner, comm=base.comm, options=base.options)
        self.trusted = base.trusted
        self._base = base
        self._reads = reads

    @property
    def can_handle_sharded_objects(self) -> bool:
        return handles_objects(self._base)

    def trusting(self) -> Self:
        return type(self)(self._base.trusting(), self._reads)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self._base.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self._base.check_version_compatibility(loaded_version)

    def make_reader(self, checkpoint_dir: Path) -> StorageReader:
        return self._base.make_reader(checkpoint_dir)

    def needed_keys(self, asked: AbstractSet[str]) -> None:
        """All: ranks of a group cut up what any of them wants."""

    def read(self, leaves: Leaves, index: Index, reader: StorageReader, comm: Comm) -> None:
        if comm.world_size == 1:
            self._base.read(leaves, index, reader, comm)
            return
        # Other groups must not wait for one in which something failed: all agree on every step.
        with comm.agreed(_STEP), self._reads.group.meeting(comm) as group:
            sharing = self._reads.plan(
                leaves,
                group,
                reader.options.buffer_bytes,
                along_chunks(index),
                _chunks_text(index, leaves),
            )
            own: Leaves = leaves
            arrays: dict[int, torch.Tensor] = {}
            if sharing is not None:
                own, arrays = own_share(leaves, sharing, group.rank)
        self._base.read(own, index, reader, comm)
        with comm.agreed("passing on what was read"), self._reads.group.meeting(comm) as group:
            if sharing is not None:
                self._reads.pass_on(sharing, arrays, group, reader.report)
                fill_doubles(leaves, sharing, arrays)

    def load_tensors_metadata(self, checkpoint_dir: PathOrStr) -> dict[str, ShardedTensor]:
        return self._base.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: PathOrStr) -> ShardedStateDict:
        return self._base.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: PathOrStr, key_prefix: str) -> None:
        self._base.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def plan_removal(self, checkpoint_dir: PathOrStr, key_prefix: str) -> PlannedRemoval:
        return self._base.plan_removal(checkpoint_dir, key_prefix)


def _chunks_text(index: Index, leaves: Leaves) -> str:
    """Differs if the chunks of any wanted tensor differ."""
    keys = sorted({leaf.key for leaf in leaves.values()})
    return hashlib.blake2b(
        repr([(key, index.chunk_shape(key)) for key in keys]).encode()
    ).hexdigest()
