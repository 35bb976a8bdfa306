"""The steps of a save on one rank: split, refuse, describe, plan, claim, write, commit, give up;
and their keywords. ``save`` and ``AsyncSaver`` call them in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.commit import CONTENT_METADATA_KEY, CheckpointingConfig
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedStateDict,
    ShardedStateful,
    is_main_replica,
)
from dist_checkpointing.mapping.nested_dicts import chained, flatten, path_text
from dist_checkpointing.mapping.objects_and_factories import as_state_dict
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, SavePlanner, replica_check
from dist_checkpointing.planning.chunking import RowBlockLayout, along_grids
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.recipe import Recipe
from dist_checkpointing.planning.save_plan import PLANNING, PlanCache, RankFacts, SavePlanning
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.serialization.recipes import changed_state
from dist_checkpointing.serialization.save_folder import SaveFolder, SaveHooks
from dist_checkpointing.storage import driver, staging
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    PlannedSaveStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    handles_objects,
    has_method,
    lacks,
)
from dist_checkpointing.strategies.incremental import base_grids, require_sharing
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.safe_pickle import check_plain
from dist_checkpointing.strategies.selection import Selection, select_strategy
from dist_checkpointing.strategies.unplanned_strategies import ForeignSaveStrategy
from dist_checkpointing.validation import save_errors

logger: logging.Logger = logging.getLogger(__name__)

Capture = Literal["copy", "background"]
_WRITING: Final = "writing"


class SaveOptions(TypedDict, total=False):
    """What ``save`` and ``async_save`` have in common; ``save`` describes each."""

    validate_access_integrity: bool
    content_metadata: dict[str, Any] | None
    overwrite: bool
    trusted: bool
    base: str | PathLike[str] | None
    fingerprints: bool
    replicas: replica_check.ReplicaCheck
    on_replica_mismatch: replica_check.OnReplicaMismatch
    recipe: Recipe | None


class JobOptions(SaveOptions, total=False):
    """All options of a SaveJob; ``save`` describes each."""

    async_sharded_save: bool
    sharded_strategy: Selection[SaveShardedStrategy]
    common_strategy: Selection[SaveCommonStrategy]
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], CommonStateDict] | None
    plan_cache: PlanCache | None


class AsyncSaveOptions(SaveOptions, total=False):
    """Keywords of ``async_save`` and ``AsyncSaver.save``. All may be left out.

    Those that are not described here are described by ``save``.

    Attributes:
        step: What the save is for; all ranks must name the same.
        capture: ``"copy"``, the default, copies everything before it returns: the state may be
            changed at once. ``"background"`` returns before the copy is made: nothing of the state
            may change before ``handle.captured`` is set; a change by an in-place operation of
            torch makes the save fail.
    """

    progress: ProgressOption | None
    step: int | None
    capture: Capture


def require_known(
    function: str,
    options: Mapping[str, object],
    known: Collection[str] = AsyncSaveOptions.__optional_keys__,
) -> None:
    """Refuse keywords that a save does not have, before ranks wait for each other.

    Raises:
        TypeError: as for any function that does not know its keyword.
    """
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class SaveJob:
    """What one rank saves, with a method for each step.

    The strategy writes ``leaves``, and the common strategy ``objects`` and ``common``, of which
    there may be copies. The ``planner`` answers for the data of the plan.
    """

    folder: SaveFolder
    common: CommonStateDict
    leaves: Leaves
    objects: Leaves
    planner: SavePlanner
    _planned: Outcome[Index]
    _plan: SavePlan
    _local_plan: SavePlan

    def __init__(
        self,
        rank: int,
        meter: Meter,
        hooks: SaveHooks,
        options: JobOptions,
        step: int | None = None,
    ) -> None:
        self.rank: int = rank
        self.meter: Meter = meter
        self.step: int | None = step
        self._hooks, self._options = hooks, options
        self._planning: SavePlanning | None = None
        self._common_files: Sequence[SealedFile] | None = None
        # What came of ``write_behind``, or the error that left it without copies.
        self._outcome: Outcome[driver.Written] = Outcome(_WRITING)
        self._of_ranks: Sequence[driver.Written] = ()
        self._buffers: staging.StagingBuffers | None = None

    # Planning: no file is touched.

    def plan(
        self, state: ShardedStateDict | ShardedStateful, folder: str | PathLike[str], comm: Comm
    ) -> None:
        """Split, refuse, exchange and plan. Collective; ``claim`` must follow.

        An error of this rank in planning is kept for ``claim``, which raises it on all ranks.
        """
        with self.meter.phase("planning"):
            state_dict = as_state_dict(state, comm)
            recipe = self._options.get("recipe")
            if recipe is not None:
                state_dict = changed_state(recipe, state_dict, comm)
            exchanged = exchange_tables(
                comm,
                PLANNING,
                lambda: self._facts_of_rank(state_dict, folder, comm),
                RankFacts.number,
            )
            if len({own.value.common for own in exchanged.facts}) > 1:
                save_errors.compare_common_state(lambda: self._common_digests, comm)
            planning = self._planning or self._start_planning(comm)
            tables = planning.exchange(comm, exchanged if self._planning else None)

            def plan() -> Index:
                self._plan, index, self._others = planning.plan_from_tables(tables)
                self.planner = planning.planner
                return index

            self._planned = Outcome.of(PLANNING, plan)
            check = self._options.get("replicas", replica_check.ReplicaCheck.OFF)
            if check is not replica_check.ReplicaCheck.OFF:
                on_mismatch = self._options.get("on_replica_mismatch", "raise")
                replica_check.compare_replicas(self.leaves.values(), check, on_mismatch, comm)
            # They hold on to the caller's state.
            del self._planning
            vars(self).pop("_common_digests", None)
            base = self._options.get("base")
            if base is not None:
                self._share_with(base, comm)

    def _facts_of_rank(
        self, state_dict: ShardedStateDict, folder: str | PathLike[str], comm: Comm
    ) -> tuple[Mapping[str, ShardTable], RankFacts]:
        """The tables of this rank, and what else the others must know. Not collective."""
        overwrite = self._options.get("overwrite", False)
        selection = self._options.get("sharded_strategy")
        strategy = select_strategy(StrategyAction.SAVE_SHARDED, selection).resolved()
        is_file = isinstance(strategy, PlannedSaveStrategy) and strategy.is_one_file(folder)
        self.folder = SaveFolder(folder, self._hooks, overwrite=overwrite, is_file=is_file)
        self._split(state_dict, strategy)
        self._make_writers(strategy)
        common = None
        if comm.world_size > 1 and self._options.get("validate_access_integrity", True):
            common = save_errors.number_of_digests(self._common_digests)
        if self.strategy.share_replicas is None:
            self._planning = self._start_planning(comm)
            tables, facts = self._planning.facts_of_rank()
        else:
            # Its tables depend on what the ranks have that share replicas.
            tables, facts = {}, RankFacts(self._destination, plan_number=0)
        return tables, facts._replace(common=common)

    def _split(self, state_dict: ShardedStateDict, strategy: SaveShardedStrategy) -> None:
        """Take the state dict apart, and refuse what cannot be saved."""
        self._parts = parts = StateDictParts.of(state_dict)
        self.common = dict(parts.common)
        metadata = self._options.get("content_metadata")
        if metadata is not None:
            self.common[CONTENT_METADATA_KEY] = metadata
        values = [*save_errors.walk(self.common)]
        save_errors.refuse_distributed(values, parts.tensors, parts.objects)
        makes_data = getattr(getattr(strategy, "planner", None), "makes_data", False)
        save_errors.check_data(parts.tensors, is_stored=not makes_data)
        values = values if self.rank == 0 else []  # only rank 0 writes them
        objects = parts.objects.items()
        written = {path: leaf for path, leaf in objects if is_main_replica(leaf.replica_id)}
        check_plain(values, written, trusted=self._options.get("trusted", False))
        save_errors.warn_of_large_tensors(values)
        self.leaves, self.objects = parts.tensors, parts.objects
        if handles_objects(strategy):
            self.leaves, self.objects = chained(parts.tensors, parts.objects), {}
        self._nested_objects = parts.nested(self.objects) if self.objects else None

    def _make_writers(self, strategy: SaveShardedStrategy) -> None:
        """Make what writes, and refuse options and destinations that it does not know."""
        options, folder = self._options, self.folder
        is_late = options.get("async_sharded_save", False)
        if is_late and not isinstance(strategy, AsyncSaveShardedStrategy):
            message = f"Cannot apply async_save to non-async strategy {strategy}"
            raise CheckpointingException(message)
        if not isinstance(strategy, PlannedSaveStrategy):
            validates = options.get("validate_access_integrity", True)
            nested = self._parts.nested(self.leaves)
            strategy = ForeignSaveStrategy(strategy, nested, validates=validates)
        self.strategy: PlannedSaveStrategy = strategy
        writer = strategy.make_writer(folder.path)
        self.writer: StorageWriter = writer
        writer.is_one_file = folder.file is not None
        casts = not writer.is_opaque and isinstance(strategy.planner, DefaultSavePlanner | None)
        for leaf in self._parts.tensors.values():
            if leaf.cast_by and writer.casts:
                leaf.cast_by = "writer"
            elif leaf.cast_by and leaf.data is not None and not casts:
                leaf.data = leaf.data.to(leaf.dtype)
        common = strategy.common_strategy(writer, self.common)
        if common is None:
            common = select_strategy(StrategyAction.SAVE_COMMON, options.get("common_strategy"))
        if self.objects and not has_method(common, "save_sharded_objects"):
            raise lacks(common, "save_sharded_objects", "writes ShardedObjects")
        writer.report, folder.durability = self.meter.add, writer.options.durability
        self._common_writer = common.lasting(folder.durability)
        form = f"{strategy.backend} {strategy.version}"
        folder.config = CheckpointingConfig(
            strategy.backend, strategy.version, common.backend, common.version
        )
        self._destination, is_shared = (folder.destination, form), folder.disks is None
        if not writer.uses_object_stores:
            remedy = "Use the backend tensorstore, or a folder of a local or a shared disk."
            location.require_local(folder.path, f"the backend {form}", remedy)
            if not is_shared:
                finding = Finding(
                    f"the backend {form} writes into a folder that all ranks see",
                    path=str(folder.path),
                    remedy="Pass a disk that all ranks share, or save with tensorstore.",
                )
                raise UnsupportedFormatError("each machine has a separate disk", [finding])
        if options.get("fingerprints", False):
            if not writer.keeps_fingerprints:
                finding = Finding(
                    "the format has no place for fingerprints",
                    found=form,
                    remedy="Save with tensorstore or zarr 2, or compute them from what is stored.",
                )
                raise UnsupportedFormatError("fingerprints cannot be kept", [finding])
            writer.takes_fingerprints = True
        if options.get("base") is not None:
            require_sharing(writer, form, None if is_shared else folder.destination)

    @cached_property
    def _common_digests(self) -> save_errors.CommonDigests:
        preprocess = self._options.get("preprocess_common_before_consistancy_check")
        return save_errors.common_digests(
            self.common if preprocess is None else preprocess(dict(self.common))
        )

    def _start_planning(self, comm: Comm) -> SavePlanning:
        planning = self.strategy.planning(
            self.leaves,
            self.writer,
            comm,
            cache=self._options.get("plan_cache"),
            others=self.objects.values(),
        )
        planning.destination = self._destination
        return planning

    def _share_with(self, base: str | PathLike[str], comm: Comm) -> None:
        """Let the writer share files of a base, if its format is that of the save. Collective.

        Where the chunks of the base make up larger ones of the save, it is cut like the base.
        """
        folder = self.folder.path
        location.require_local(folder, "an incremental save")
        path, index = location.as_local_folder(base).absolute(), self._planned.result
        form = self.strategy.backend, self.strategy.version
        # A planner of a user may know what it has planned to the last item.
        may_be_cut = (
            index is not None
            and self.planner.settings is not None
            and not self.planner.makes_data
            and isinstance(self.writer.layout, RowBlockLayout)
        )
        grids = comm.from_rank0(
            "looking at the base",
            lambda: base_grids(path, folder, form, index if may_be_cut else None),
        )
        self.writer.base = None if grids is None else path
        if grids and index is not None:
            table, index = along_grids(self._plan.table, index, grids)
            self._plan = replace(self._plan, table=table, index=index)
            self._planned = replace(self._planned, result=index)

    def claim(self, comm: Comm, *, durable: bool) -> None:
        """Claim the folder, if all ranks have planned, see ``SaveFolder.claim``. Collective."""

        def created_names(index: Index) -> list[str]:
            self._check_room(index)
            objects = sorted(set(self._others.key_column))
            names = [*self._common_writer.created_names(objects)]
            names += self.writer.created_names(index, world_size=comm.world_size)
            save_errors.refuse_shared_keys(index, self._others)
            return names

        before = self.folder.data
        self.folder.claim(comm, self._planned, created_names, durable=durable)
        data: Any = self.folder.data
        self.writer.attempt = self.folder.claimed.attempt
        if data != before:
            self.writer.checkpoint_dir = data
            self.writer.reset(data)

    def _check_room(self, index: Index) -> None:
        """Refuse a disk that is too full, where nothing makes room and nothing takes less of it."""
        folder, is_packed = self.folder.path, getattr(self.writer, "codec_name", None) is not None
        is_all = self.folder.disks is None and self._options.get("base") is None and not is_packed
        # Nobody knows what else a writer of others makes of the values, or where.
        is_all &= self.writer.shares_files
        if isinstance(folder, Path) and is_all and not location.is_there(folder):
            location.check_room(folder, index.num_bytes)

    def _prepare_write(self, comm: Comm) -> None:
        """Get ready to write. The first thing in the body of an agreement."""
        self._local_plan = driver.prepare_write(self._plan, self.writer, comm)
        self.folder.check(self.rank)

    # Copies, for a save in the background.

    def prepare_copy(self, buffers: staging.StagingBuffers, comm: Comm) -> None:
        """Get ready to copy. The first thing in the body of an agreement."""
        self._prepare_write(comm)
        buffers.acquire()
        self._buffers = buffers

    def release_buffers(self) -> None:
        """Free the buffers for the next save."""
        if self._buffers is not None:
            self._buffers.release()
            self._buffers = None

    def capture(self) -> None:
        """Copy what this rank will write, and drop the caller's state. Not collective."""
        assert self._buffers is not None
        num_bytes = self._local_plan.num_bytes
        with self.meter.phase("copying", num_bytes):
            self.common = staging.detached_copy(self.common) if self.rank == 0 else {}
            if self.objects:
                self._nested_objects = self._parts.nested(staging.copied_objects(self.objects))
            self.planner = self.strategy.stage(self._local_plan, self.planner, self._buffers)
            self._drop_leaves()
            self.meter.add(num_bytes)

    def _drop_leaves(self) -> None:
        del self._parts, self.strategy
        self.leaves, self.objects = {}, {}

    def watch_state(self) -> None:
        """Note what ``capture_behind`` will copy: this thread may still compute it on a GPU."""
        assert self._buffers is not None
        common, _ = flatten(self.common if self.rank == 0 else {})
        named = [(leaf.key, leaf.data) for leaf in self.leaves.values()]
        named += [(path_text(path), value) for path, value in common.items()]
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        self._buffers.follow(tensor for _, tensor in tensors)
        self._require_unchanged = staging.change_check(tensors)

    def capture_behind(self) -> None:
        """``capture`` in another thread, after ``watch_state``; an error is for ``write_local``."""
        try:
            self.capture()
            self._require_unchanged()
        except Exception as error:  # noqa: BLE001 - all ranks must hear of it
            self._outcome = Outcome(_WRITING, error=error)

    # Writing.

    def write(self, comm: Comm) -> None:
        """Write everything but the commit, from the caller's own state. Collective."""
        if self.writer.is_opaque:
            self._write_common_first(comm)

        def write_local() -> driver.Written:
            self._prepare_write(comm)
            return self.write_local()

        self._gather(write_local, comm)
        # What describes the whole takes memory, and needs none of this.
        self._drop_leaves()
        self.common, self._nested_objects = {}, None
        del self.planner, self._plan, self._local_plan

    def _write_common_first(self, comm: Comm) -> None:
        """By itself: a strategy that talks to other ranks must find all of them there."""
        with comm.agreed("writing the common state"):
            self.folder.check(self.rank)
            self._common_files = self._write_common()

    def write_local(self) -> driver.Written:
        """Write what this rank has to write. Not collective."""
        if self._outcome.error is not None:
            raise self._outcome.error  # there are no copies
        num_bytes = self._local_plan.num_bytes
        what = f"what this rank writes ({num_bytes} bytes of tensors)"
        with (
            self.meter.phase("writing", num_bytes),
            location.explained_full_disk(self.folder.path, what),
        ):
            files = self._common_files
            if files is None:
                files = self._write_common()
            written = driver.write_plan(self._local_plan, self.planner, self.writer, self.rank)
        return replace(written, files=(*written.files, *files), save=self._save_number())

    def _write_common(self) -> Sequence[SealedFile]:
        folder, files = self.folder.data, list[SealedFile]()
        if self.rank == 0:
            files += self._common_writer.save_common(self.common, folder) or ()
        if self._nested_objects is not None:
            files += self._common_writer.save_sharded_objects(self._nested_objects, folder) or ()
        return files

    def _save_number(self) -> int:
        # Ranks could mix up two saves that they finish later.
        return xxhash.xxh3_64_intdigest(f"{self.folder.claimed.attempt} {self.step}".encode()) >> 2

    def _gather(self, write: Callable[[], driver.Written], comm: Comm) -> None:
        """Learn what all ranks have written. Collective."""
        self._of_ranks = driver.gather_written(write, self.writer, comm)
        for finalize in self.writer.finalize_fns:
            with comm.agreed("finishing the write"):
                finalize()

    # Writing behind the training.

    def start_async_save(self, comm: Comm) -> AsyncRequest:
        """Copy the state, and return what writes and commits the copies. Collective."""
        if isinstance(self.strategy, ForeignSaveStrategy):
            self._write_common_first(comm)
            with comm.agreed(_WRITING):
                request = self.strategy.request(self.folder.data)
            self._outcome = Outcome(_WRITING, driver.Written(save=self._save_number()))
            request.add_finalize_fn(lambda: self.finish(comm))
            return request
        with comm.agreed("copying the state"):
            self.prepare_copy(staging.StagingBuffers(), comm)
            self.capture()
        return AsyncRequest(self.write_behind, (), [lambda: self.finish(comm)])

    def write_behind(self) -> None:
        """``write_local`` in a thread, from copies: its error is kept for ``finish``."""
        self._outcome = Outcome.of(_WRITING, self.write_local)

    def _written_behind(self) -> driver.Written:
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._outcome.result is None:
            raise CheckpointingException("a rank stopped writing", [Finding("wrote only a part")])
        return self._outcome.result

    def finish(
        self, comm: Comm, write: Callable[[], driver.Written] | None = None, retries: int = 0
    ) -> None:
        """Commit what all ranks have written behind, or what ``write`` writes now. Collective.

        That is done once more, with all that it takes, for every retry. Buffers are free after it.
        """
        try:
            for tries_left in range(retries, -1, -1):
                try:
                    if tries_left == retries:
                        self.folder.make_durable(comm)
                    else:
                        self._start_over(comm)
                    self._gather(write or self._written_behind, comm)
                    self.commit(comm)
                    break
                except BaseException as error:
                    self.folder.give_up(error)
                    is_silent = isinstance(error, RankFailedError) and error.silent_ranks
                    if not tries_left or is_silent or not isinstance(error, CheckpointingException):
                        raise
                    logger.warning("writing once more (%d tries left): %s", tries_left, error)
        finally:
            self.release_buffers()
        self._hooks.call_after_commit(comm)

    def _start_over(self, comm: Comm) -> None:
        """Claim the folder again, which was cleared away, and get ready to write. Collective."""
        with comm.agreed("writing once more"):
            if self._outcome.error is not None:
                raise self._outcome.error
        self.claim(comm, durable=True)
        with comm.agreed("writing once more"):
            self._prepare_write(comm)

    # The end.

    def commit(self, comm: Comm) -> None:
        """Write what describes the whole, and turn it into a checkpoint. Collective."""
        with self.meter.phase("committing"):
            self.folder.commit(comm, self._describe_whole, self.writer)
        self.meter.log()

    def _describe_whole(self) -> driver.Finished:
        """Write it, on rank 0."""
        if len({written.save for written in self._of_ranks}) > 1:
            finding = Finding(
                "ranks finalize different saves, or named different steps",
                path=str(self.folder.path),
                remedy="Every rank makes the same calls in the same order.",
            )
            raise CheckpointingException("the staged data is not of one save", [finding])
        if self.rank:
            return (), {}
        assert self._planned.result is not None
        return driver.finish_all(self._planned.result, self._of_ranks, self.writer)
