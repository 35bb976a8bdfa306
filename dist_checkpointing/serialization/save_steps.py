"""What one rank saves: its own values or copies of them, claim, write, finish, commit, give up;
folders that not all ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Unpack

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.errors import CheckpointingException, Finding, RankFailedError
from dist_checkpointing.filesystem.location import as_location, relative
from dist_checkpointing.format.commit import CONTENT_METADATA_KEY, Attempt, CheckpointingConfig
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import PARTS_NAME
from dist_checkpointing.format.object_store_commit import StoreAttempt, begin_attempt
from dist_checkpointing.format.seal import SEAL_NAME, SealedFile, write_seal
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from dist_checkpointing.mapping.nested_dicts import flatten, path_text
from dist_checkpointing.mapping.state_dict_parts import Partition, partition
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout, along_grids
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.serialization.save_checks import (
    Claimed,
    Decided,
    check_place,
    check_values,
    refuse_clashes,
    require_one_save,
    take_fingerprints,
)
from dist_checkpointing.serialization.save_options import JobOptions, SaveHooks
from dist_checkpointing.storage import driver
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.storage.staging import StagingBuffers, detached_copy, stage_plan
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    handles_objects,
    require_method,
)
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.validation.unwrapped import refuse_distributed


@dataclass(frozen=True, slots=True, eq=False)
class RankValues:
    """What this rank gives to those that write: the caller's own values, or copies.

    Attributes:
        common: The common state, written on rank 0.
        objects: Nest of the ShardedObjects that the common strategy writes; None if it has none.
        leaves: Nest of what a strategy without a StorageWriter writes.
        planner: Planner that answers for the data of the plan's items.
    """

    common: CommonStateDict
    objects: ShardedStateDict | None
    leaves: ShardedStateDict
    planner: SavePlanner | None


class RankState:
    """What one rank saves: the caller's own state until ``capture`` has copied it.

    Args:
        parts: The state dict, taken apart.
        common: Common state.
        strategy: Writes the sharded state.
        rank: The rank; only rank 0 writes the common state.

    Attributes:
        common: Common state.
        by_strategy: Leaves that the strategy writes.
        by_common: Leaves that the common strategy writes.
        planner: Answers for the data of the plan, once there is one.
    """

    def __init__(
        self, parts: Partition, common: CommonStateDict, strategy: SaveShardedStrategy, rank: int
    ) -> None:
        self._parts, self.common = parts, common
        self._writes_common = rank == 0
        self._is_planned = isinstance(strategy, PlannedSaveStrategy)
        self.by_strategy: Leaves = parts.tensors
        self.by_common: Leaves = parts.objects
        if handles_objects(strategy):
            self.by_strategy, self.by_common = {**parts.tensors, **parts.objects}, {}
        self.planner: SavePlanner | None = None
        self._copies: RankValues | None = None

    def values(self) -> RankValues:
        """What is written: of the caller's own state, or the copies."""
        if self._copies is not None:
            return self._copies
        return self._nested(self.common, self.by_common, self.by_strategy, self.planner)

    def _nested(
        self, common: CommonStateDict, objects: Leaves, leaves: Leaves, planner: SavePlanner | None
    ) -> RankValues:
        nested = self._parts.nested
        return RankValues(
            common,
            nested(objects) if objects else None,
            {} if self._is_planned else nested(leaves),
            planner,
        )

    def capture(self, plan: SavePlan | None, buffers: StagingBuffers) -> None:
        """Copy what this rank will write, by its plan if it has one; let go of the rest."""
        common = detached_copy(self.common) if self._writes_common else {}
        objects = _copied_objects(self.by_common)
        leaves: Leaves = {}
        planner: SavePlanner | None = None
        if plan is None:
            leaves = _copied_leaves(self.by_strategy, buffers)
        else:
            assert self.planner is not None
            planner = stage_plan(plan, self.planner, buffers)
        self._copies = self._nested(common, objects, leaves, planner)
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing of the caller's state."""
        self._parts, self.common = partition({}), {}
        self.by_strategy, self.by_common, self.planner = {}, {}, None

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """The caller's tensors that ``capture`` may copy, by key, or by path in common state."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for leaf in self.by_strategy.values():
            if isinstance(leaf.data, torch.Tensor):
                tensors.setdefault(leaf.key, []).append(leaf.data)
        values, _ = flatten(self.common if self._writes_common else {})
        for path, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(path_text(path), []).append(value)
        return tensors


def _copied_objects(leaves: Leaves) -> dict[Any, ShardedBase]:
    """Leaves of their own, with copies of the objects that will be written."""
    result: dict[Any, ShardedBase] = {}
    for path, leaf in leaves.items():
        copied = leaf.without_data()
        if not isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            copied.data = detached_copy(leaf.data)
        result[path] = copied
    return result


def _copied_leaves(leaves: Leaves, buffers: StagingBuffers) -> dict[Any, ShardedBase]:
    """Copies of all tensors and objects, for a strategy that alone knows what it writes."""
    tensors = {
        path: leaf.data for path, leaf in leaves.items() if isinstance(leaf.data, torch.Tensor)
    }
    sizes = [tensor.nbytes for tensor in tensors.values()]
    copies = buffers.fill(sizes, tensors.values())
    copied = dict(zip(tensors, copies, strict=True))
    result = _copied_objects(leaves)
    for path, leaf in result.items():
        if isinstance(leaf, ShardedTensor):
            leaf.data = copied.get(path)
    return result


logger: logging.Logger = logging.getLogger(__name__)


class SaveJob:
    """What is saved, and how. One object a rank; ``prepare`` makes one that is planned.

    In order: ``take``, ``claim``, then ``write``, or in its place ``secure`` (or ``check_claim``),
    ``get_ready``, ``capture``, ``write_own`` and ``finish``; last ``commit``; ``give_up`` on error.

    Args:
        state_dict: of this rank.
        folder: of the checkpoint, as the caller named it.
        rank: whose job it is.
        meter: counts what is done.
        hooks: called on rank 0, and on the lowest rank of each disk.
        options: see ``save``.

    Attributes:
        rank: The rank whose job it is.
        folder: Absolute path of the checkpoint.
        place: What names it alike on all ranks.
        data_folder: Where its files are; another one in an object store, once it is claimed.
        strategy, writer: Write the sharded state; the writer of a strategy made of one, else None.
        meter: Counts what is done.
        own: The state that this rank saves.
        attempt_id: Name of the attempt, the same on every rank, once it is claimed.
        index: What the checkpoint will hold, once it is planned; None for a third party's strategy.
    """

    def __init__(
        self,
        state_dict: ShardedStateDict,
        folder: str | PathLike[str],
        rank: int,
        meter: Meter,
        hooks: SaveHooks,
        **options: Unpack[JobOptions],
    ) -> None:
        self.rank, self.meter = rank, meter
        # Whoever writes may do so when the working directory is another one.
        self.folder = self.data_folder = as_location(folder).absolute()
        self._hooks, self._disks = hooks, hooks.disks
        self.place: str = str(self.folder) if self._disks is None else self._disks.place
        selected: SaveShardedStrategy = select_strategy(
            StrategyAction.SAVE_SHARDED, options.get("sharded_strategy")
        )
        self.strategy: SaveShardedStrategy = selected.resolved()
        common_writer: SaveCommonStrategy = select_strategy(
            StrategyAction.SAVE_COMMON, options.get("common_strategy")
        )
        parts = partition(state_dict)
        common = dict(parts.common)
        if options.get("content_metadata") is not None:
            common[CONTENT_METADATA_KEY] = options["content_metadata"]
        refuse_distributed(replace(parts, common=common), parts.objects)
        trusted = options.get("trusted", False)
        check_values(self.strategy, parts, common if rank == 0 else {}, trusted=trusted)
        self.own = RankState(parts, common, self.strategy, rank)
        if self.own.by_common:
            require_method(common_writer, "save_sharded_objects", "writes ShardedObjects")
        self.writer: StorageWriter | None = None
        if isinstance(self.strategy, PlannedSaveStrategy):
            self.writer = self.strategy.make_writer(self.folder)
            self.writer.report = meter.add
            common_writer = common_writer.lasting(self.writer.options.durability)
        check_place(self.folder, self.strategy, self.writer, is_shared=self._disks is None)
        if options.get("fingerprints", False):
            take_fingerprints(self.strategy, self.writer)
        self._durability = (
            Durability.FSYNC if self.writer is None else self.writer.options.durability
        )
        self._common_writer = common_writer
        self._config = CheckpointingConfig(
            self.strategy.backend,
            self.strategy.version,
            common_writer.backend,
            common_writer.version,
        )
        self._options = options
        self.index: Index | None = None
        self._plan: SavePlan | None = None
        self._own_plan: SavePlan | None = None
        self._attempt: Attempt | StoreAttempt | None = None
        self.attempt_id = ""
        self._written: driver.Written | None = None
        self._of_ranks: Sequence[driver.Written] = ()
        self._finalize_fns: Sequence[Callable[[], None]] = ()

    @property
    def num_bytes(self) -> int:
        """What this rank copies and writes, as far as it is known."""
        plan = self._plan if self._own_plan is None else self._own_plan
        return 0 if plan is None else plan.num_bytes

    def take(self, planned: Outcome[Decided]) -> None:
        """Take what the ranks have decided, or the error of this rank for ``claim`` to tell."""
        self._planned, decided = planned, planned.result
        if decided is not None:
            self._plan, self.index, self.own.planner = decided.plan, decided.index, decided.planner
            self._objects = decided.objects

    @property
    def is_cut_in_row_blocks(self) -> bool:
        """Whether all that is written of a tensor with a chunk grid are whole chunks."""
        layout = None if self.writer is None else self.writer.layout
        planner = self.own.planner
        # A planner of a user may know what it has planned to the last item.
        is_own = planner is not None and planner.settings is not None and not planner.makes_data
        return is_own and isinstance(layout, RowBlockLayout)

    def cut_along(self, grids: Mapping[str, Ints]) -> None:
        """Write smaller chunks of some tensors, see ``nested_grids``."""
        if self._plan is not None:
            self._plan = along_grids(self._plan, grids)
            self.index = self._plan.index

    def claim(self, comm: Comm, *, secured: bool = False) -> None:
        """Take possession of the folder, if all ranks have planned. Collective.

        Args:
            comm: the ranks that save together.
            secured: wait for the disk too, so that ``check_claim`` is enough before writing.
                Otherwise ``secure`` must follow.
        """
        self._claimed = comm.from_rank0(
            "claiming the folder",
            lambda: self._begin_attempt(comm.world_size, secured=secured),
            after=self._planned,
        )
        self.attempt_id = self._claimed.attempt
        if self._disks is not None:
            with comm.agreed("claiming the folder on every disk"):
                if self._disks.leads and comm.rank:
                    self._begin_part(self._claimed, secured=secured)
        data_folder = self.folder / self._claimed.data
        if self.writer is not None and data_folder != self.data_folder:
            self.writer.checkpoint_dir = data_folder  # type: ignore[assignment]
            self.writer.reset(data_folder)
        self.data_folder = data_folder

    def _begin_attempt(self, world_size: int, *, secured: bool) -> Claimed:
        self._hooks.before_claim(self.index)
        objects = sorted(set(self._objects.key_column))
        names = [SEAL_NAME, *self._common_writer.created_names(objects)]
        if self.index is not None and self.writer is not None:
            names += self.writer.created_names(self.index, world_size=world_size)
        refuse_clashes(names, self._objects, self.index)
        if self._disks is not None:
            names.append(PARTS_NAME)
        overwrite = self._options.get("overwrite", False)
        self._attempt = begin_attempt(self.folder, names, self._durability, overwrite=overwrite)
        self._note_attempt(self._attempt, secured=secured)
        data = relative(self._attempt.folder, self.folder)
        creates = () if self._disks is None else self._attempt.creates
        return Claimed(self._attempt.id, str(self.folder), data, self._config, creates)

    def _begin_part(self, claimed: Claimed, *, secured: bool) -> None:
        """Claim the folder of another disk than rank 0's for the same attempt."""
        self._hooks.before_claim(self.index)
        self._attempt = Attempt.begin(
            self.folder,
            claimed.creates,
            overwrite=self._options.get("overwrite", False),
            durability=self._durability,
            name=claimed.attempt,
        )
        self._note_attempt(self._attempt, secured=secured)

    def _note_attempt(self, attempt: Attempt | StoreAttempt, *, secured: bool) -> None:
        self._hooks.after_claim(attempt.id)
        if secured:
            attempt.secure()

    def secure(self, comm: Comm) -> None:
        """Make durable what a crash must not lose, before a byte is written. Collective.

        Raises:
            CheckpointingException: see ``Claimed``.
        """
        with comm.agreed("claiming the folder"):
            if self._attempt is not None:
                self._attempt.secure()
            self.check_claim()

    def check_claim(self) -> None:
        """Make sure that this rank sees what rank 0 has claimed.

        Raises:
            CheckpointingException: see ``Claimed``.
        """
        self._claimed.check(self.data_folder, self._config, self.rank)

    def _write_common(self, values: RankValues) -> list[SealedFile]:
        folder, files = self.data_folder, list[SealedFile]()
        if self.rank == 0:
            files += self._common_writer.save_common(values.common, folder) or ()
        if values.objects is not None:
            files += self._common_writer.save_sharded_objects(values.objects, folder) or ()
        return files

    def write(self, comm: Comm) -> None:
        """Write everything but the commit, from the caller's own state. Collective."""
        if self._plan is None or self.writer is None:
            with self.meter.phase("writing"):
                values = self._save_common(comm)
                with comm.agreed("writing"):
                    self.strategy.save(values.leaves, self.data_folder)
            return

        def write_own() -> driver.Written:
            self.get_ready(comm)
            self.check_claim()
            self.write_own()
            return self._all_written()

        self._of_ranks = driver.gather_written(write_own, self.writer, comm)
        # What describes the whole takes memory, and needs none of this.
        self.own.let_go()
        self._plan = self._own_plan = None

    def put_off(self, comm: Comm) -> AsyncRequest:
        """Write the common state, and let an asynchronous strategy prepare the rest. Collective."""
        assert isinstance(self.strategy, AsyncSaveShardedStrategy)
        values = self._save_common(comm)
        with comm.agreed("writing"):
            return self.strategy.async_save(values.leaves, self.data_folder)

    def _save_common(self, comm: Comm) -> RankValues:
        """By itself: a strategy that talks to other ranks must find all of them there."""
        with comm.agreed("writing the common state"):
            self.check_claim()
            values = self.own.values()
            self._write_common(values)
        return values

    def get_ready(self, comm: Comm) -> None:
        """Let the writer change what this rank will write; see ``driver.prepare_write``."""
        if self._plan is not None and self.writer is not None:
            self._own_plan = driver.prepare_write(self._plan, self.writer, comm)

    def capture(self, buffers: StagingBuffers) -> None:
        """Copy what this rank will write, and let go of the caller's state. Not collective."""
        with self.meter.phase("copying"):
            self.meter.expect(self.num_bytes)
            self.own.capture(self._own_plan, buffers)
            self.meter.add(self.num_bytes)

    def write_own(self) -> None:
        """Write what this rank has to write. Not collective."""
        self._written = None
        with self.meter.phase("writing"):
            self.meter.expect(self.num_bytes)
            values = self.own.values()
            files = self._write_common(values)
            written = driver.Written()
            if self._own_plan is not None and self.writer is not None:
                assert values.planner is not None
                written = driver.write_plan(self._own_plan, values.planner, self.writer, self.rank)
            elif isinstance(self.strategy, AsyncSaveShardedStrategy):
                request = self.strategy.async_save(values.leaves, self.data_folder)
                request.execute()
                self._finalize_fns = tuple(request.finalize_fns)
            else:
                self.strategy.save(values.leaves, self.data_folder)
        self._written = replace(written, files=(*written.files, *files))

    def _all_written(self) -> driver.Written:
        """What this rank has written, or an error if it did not come to the end."""
        if self._written is None:
            raise CheckpointingException("a rank stopped writing", [Finding("wrote only a part")])
        return self._written

    def finish(self, comm: Comm, save_number: Callable[[], int]) -> None:
        """Learn what all ranks have written. Collective, after ``write_own``.

        Args:
            comm: the ranks that save together.
            save_number: gives the number of this save on all ranks, or raises what failed on this.
        """

        def told() -> driver.Written:
            number = save_number()
            return replace(self._all_written(), save=number)

        if self.writer is not None:
            self._of_ranks = driver.gather_written(told, self.writer, comm)
            return
        saves = comm.exchange("writing", lambda: told().save, lambda number: number)
        require_one_save(saves, self.folder)
        for finalize in self._finalize_fns:
            with comm.agreed("finishing the write"):
                finalize()

    def commit(self, comm: Comm) -> None:
        """Write what describes the whole, and turn it into a checkpoint. Collective."""
        part = self._attempt if isinstance(self._attempt, Attempt) else None
        if self._disks is not None:
            self._disks.secure_part(part, self._durability, comm)
        with self.meter.phase("committing"), comm.agreed("committing"):
            require_one_save([written.save for written in self._of_ranks], self.folder)
            if self._attempt is not None and self.rank == 0:
                # What a third party's strategy creates is not known: all that is there is sealed.
                finished, created = driver.Finished(), None
                if self.index is not None and self.writer is not None:
                    finished = driver.finish_all(self.index, self._of_ranks, self.writer)
                    created = self._attempt.creates
                write_seal(
                    self.data_folder,
                    self._config,
                    finished.files,
                    tables=finished.tables,
                    created=created,
                    durability=self._durability,
                    is_all_here=self._disks is None,
                )
                self._attempt.commit(self._config)
        if self._disks is not None:
            self._attempt = None  # nothing is taken back from here on
            self._disks.commit_part(part, self._config, self._durability, comm)
        self.meter.log()

    def give_up(self, error: BaseException) -> None:
        """Clear away what was written, if all ranks have stopped; else leave it to the next save.

        Args:
            error: what ended the save. An interrupt is no agreement, and nobody knows what a rank
                does that does not answer: they may still write, and what they wrote must stay named
                as ours. (Should all but the last agreement have come about, a checkpoint stays.)
        """
        if self._attempt is None:
            return
        unheard = isinstance(error, RankFailedError) and bool(error.silent_ranks)
        if isinstance(error, CheckpointingException) and not unheard:
            self._attempt.abandon()
        else:
            self._attempt.release()
        self._attempt = None
