"""The steps of a save on one rank: split, refuse, describe, plan, claim, write, commit, give up;
and their keywords. ``save`` and ``AsyncSaver`` call them in order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, NamedTuple, TypedDict

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
from dist_checkpointing.filesystem.location import (
    as_local_folder,
    as_location,
    check_one_destination,
    relative,
    require_local,
)
from dist_checkpointing.format import seal
from dist_checkpointing.format.commit import (
    CONTENT_METADATA_KEY,
    Attempt,
    CheckpointingConfig,
    StoreAttempt,
    begin_attempt,
    check_distinct,
)
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, PARTS_NAME, is_in_attempt
from dist_checkpointing.format.seal import MAX_SEAL_BYTES, SEAL_NAME, SealedFile, write_seal
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from dist_checkpointing.mapping.nested_dicts import chained, flatten, path_text
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout, along_grids
from dist_checkpointing.planning.coverage import check_coverage, main_rows
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.replica_check import (
    OnReplicaMismatch,
    ReplicaCheck,
    ReplicaComparison,
)
from dist_checkpointing.planning.save_plan import PLANNING, PlanCache, RankFacts, SavePlanning
from dist_checkpointing.planning.shard_table import ShardTable, describe
from dist_checkpointing.planning.table_exchange import ExchangedTables
from dist_checkpointing.storage import driver
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.storage.staging import StagingBuffers, detached_copy, stage_plan
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    handles_objects,
    require_method,
)
from dist_checkpointing.strategies.incremental import base_grids, require_sharing
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.safe_pickle import check_plain
from dist_checkpointing.strategies.selection import Selection, select_strategy
from dist_checkpointing.validation.common_state_agreement import CommonDigests, compare_common_state
from dist_checkpointing.validation.save_errors import (
    check_data,
    check_storable,
    refuse_distributed,
    refuse_shared_keys,
    warn_of_large_tensors,
)

logger: logging.Logger = logging.getLogger(__name__)

Capture = Literal["copy", "background"]


class SaveOptions(TypedDict, total=False):
    """What ``save`` and ``async_save`` have in common; ``save`` describes each."""

    validate_access_integrity: bool
    content_metadata: dict[str, Any] | None
    overwrite: bool
    trusted: bool
    base: str | PathLike[str] | None
    fingerprints: bool
    replicas: ReplicaCheck
    on_replica_mismatch: OnReplicaMismatch


class JobOptions(SaveOptions, total=False):
    """All options of a SaveJob; ``save`` describes each."""

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


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of a save whose ranks do not share one: each gets what its own ranks write.

    Rank 0 claims, seals and commits on its own disk. The lowest rank of every other disk claims
    the folder there for the same attempt, and notes the commit when it has happened.

    Attributes:
        destination: Name of the checkpoint, the same on all ranks, whose folders may differ.
        leads: Whether this rank is the lowest one of its disk, which calls the hooks.
        on_part: Called on these ranks but rank 0, once the checkpoint is committed.
    """

    destination: str
    leads: bool
    on_part: Callable[[], None]

    def make_part_durable(self, part: Attempt | None, durability: Durability, comm: Comm) -> None:
        """Make the names of what is on each disk durable, where rank 0 cannot do it. Collective."""
        with comm.agreed("securing every disk"):
            if part is not None and comm.rank and durability is Durability.FSYNC:
                names = [name for name, _ in location.files_below(part.folder, part.folder)]
                location.fsync_folders([part.folder / name for name in names], part.folder)
                location.fsync_folder(part.folder)

    def commit_part(
        self, part: Attempt | None, config: CheckpointingConfig, durability: Durability, comm: Comm
    ) -> None:
        """Note on every disk but rank 0's that rank 0 has committed, and of what. Collective.

        Nothing is removed from here on. A part on which this is not noted can still be used. The
        attempt of this rank, if it has one, is ended.
        """

        def read() -> bytes:
            assert part is not None
            return location.read_bytes(part.folder / SEAL_NAME, MAX_SEAL_BYTES)

        try:
            content = comm.from_rank0("telling every disk of the commit", read)
            if part is None or comm.rank == 0:
                return
            try:
                location.write(part.folder / SEAL_NAME, content, durability)
                part.commit(config)
            except OSError as error:
                logger.warning("%s: the commit is not noted on this disk: %s", part.folder, error)
            self.on_part()
        finally:
            if part is not None:
                part.release()


@dataclass(frozen=True, slots=True)
class SaveHooks:
    """What code of this library adds to a save; a user has no use for it.

    Attributes:
        before_claim: Called on rank 0 with what the checkpoint will hold (None for third-party
            strategies) before the folder is touched; what it raises, all ranks raise.
        after_claim: Called on rank 0 with the name of this attempt (``.dckpt/attempt.json`` holds
            it), before anything is written; what it raises, all ranks raise.
        disks: The disks of a save whose ranks do not share one. The folder of a rank then holds a
            part of the checkpoint, which only CheckpointManager loads.
    """

    before_claim: Callable[[Index | None], None] = lambda _: None
    after_claim: Callable[[str], None] = lambda _: None
    disks: Disks | None = None


class ClaimedFolder(NamedTuple):
    """What rank 0 has claimed.

    Attributes:
        attempt: Name of the attempt.
        folder: Absolute path of the checkpoint on rank 0.
        data: Where its files are, relative to that.
        config: Content of the ``metadata.json`` that will be committed.
        creates: Relative names of the files and folders that the save makes, if other disks must
            know them.
    """

    attempt: str
    folder: str
    data: str
    config: CheckpointingConfig
    creates: tuple[str, ...]


class SaveJob:
    """What one rank saves, with a method for each step. This one drives a StorageWriter.

    Attributes:
        folder: Absolute path of the checkpoint.
        data_folder: Where its files are; another one in an object store, once it is claimed.
        common: The common state, or a copy of it.
        leaves: The leaves that the strategy writes, until they are copied or written.
        objects: The leaves that the common strategy writes, likewise.
        planner: Answers for the data of the plan, once there is one.
        index: What the checkpoint will hold, once it is planned; None for a third party's strategy.
        step: What the save is for.
    """

    writer: StorageWriter

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        state_dict: ShardedStateDict,
        folder: str | PathLike[str],
        rank: int,
        meter: Meter,
        hooks: SaveHooks,
        options: JobOptions,
    ) -> None:
        self.strategy, self.rank, self.meter = strategy, rank, meter
        self._hooks, self._disks, self._options = hooks, hooks.disks, options
        # Whoever writes may do so when the working directory is another one.
        self.folder = self.data_folder = as_location(folder).absolute()
        name = str(self.folder) if self._disks is None else self._disks.destination
        self._destination = (name, f"{strategy.backend} {strategy.version}")
        self._validates = options.get("validate_access_integrity", True)
        self._split(state_dict)
        writer, self._durability = None, Durability.FSYNC
        common_writer: SaveCommonStrategy = select_strategy(
            StrategyAction.SAVE_COMMON, options.get("common_strategy")
        )
        if self.objects:
            require_method(common_writer, "save_sharded_objects", "writes ShardedObjects")
        if isinstance(strategy, PlannedSaveStrategy):
            self.writer = writer = strategy.make_writer(self.folder)
            writer.report, self._durability = meter.add, writer.options.durability
            common_writer = common_writer.lasting(self._durability)
        self._require_features(writer)
        self._common_writer = common_writer
        self._config = CheckpointingConfig(
            strategy.backend, strategy.version, common_writer.backend, common_writer.version
        )
        self.step: int | None = None
        self.index: Index | None = None
        self._plan: SavePlan | None = None
        self._planning: SavePlanning | None = None
        self._replicas: ReplicaComparison | None = None
        self._digests: CommonDigests | None = None
        self._local_plan: SavePlan | None = None
        self._attempt: Attempt | StoreAttempt | None = None
        self._written: driver.Written | None = None
        self._of_ranks: Sequence[driver.Written] = ()
        self._buffers: StagingBuffers | None = None
        self._error: Exception | None = None
        self._is_lost = False

    def _split(self, state_dict: ShardedStateDict) -> None:
        """Take the state dict apart, and refuse what cannot be saved."""
        self._parts = parts = StateDictParts.of(state_dict)
        self.common = dict(parts.common)
        metadata = self._options.get("content_metadata")
        if metadata is not None:
            self.common[CONTENT_METADATA_KEY] = metadata
        refuse_distributed(replace(parts, common=self.common), parts.objects)
        check_data(parts)
        planner = getattr(self.strategy, "planner", None)
        if planner is None or not planner.makes_data:
            check_storable(parts.tensors)
        common = self.common if self.rank == 0 else {}
        objects = parts.objects.items() if parts.objects else ()
        written = {path: leaf for path, leaf in objects if is_main_replica(leaf.replica_id)}
        check_plain(common, written, trusted=self._options.get("trusted", False))
        warn_of_large_tensors(common)
        self.leaves: Leaves = parts.tensors
        self.objects: Leaves = parts.objects
        if handles_objects(self.strategy):
            self.leaves, self.objects = chained(parts.tensors, parts.objects), {}
        self._nested_objects = parts.nested(self.objects) if self.objects else None
        self.planner: SavePlanner | None = None

    def _require_features(self, writer: StorageWriter | None) -> None:
        """Refuse options and places that the format does not know; None for a third party's."""
        strategy, is_shared = self.strategy, self._disks is None
        form = f"{strategy.backend} {strategy.version}"
        if writer is None or not writer.uses_object_stores:
            require_local(self.folder, f"the backend {form}")
            if not is_shared:
                finding = Finding(
                    f"the backend {form} writes into a folder that all ranks see",
                    path=str(self.folder),
                    remedy="Pass a disk that all ranks share, or save with tensorstore.",
                )
                raise UnsupportedFormatError("each machine has a disk of its own", [finding])
        if self._options.get("fingerprints", False):
            if writer is None or not writer.keeps_fingerprints:
                finding = Finding(
                    "the format has no place for fingerprints",
                    found=form,
                    remedy="Save with tensorstore or zarr 2, or compute them from what is stored.",
                )
                raise UnsupportedFormatError("fingerprints cannot be kept", [finding])
            writer.takes_fingerprints = True
        if self._options.get("base") is not None:
            require_sharing(strategy, writer, None if is_shared else self._destination[0])

    @property
    def num_bytes(self) -> int:
        """What this rank copies and writes, as far as it is known."""
        plan = self._plan if self._local_plan is None else self._local_plan
        return 0 if plan is None else plan.num_bytes

    # Planning: no file is touched.

    def facts_of_rank(self, comm: Comm) -> tuple[Mapping[str, ShardTable], RankFacts]:
        """The tables of this rank, and what else the others must know. Not collective."""
        common = None
        if self._validates and comm.world_size > 1:
            common = self._common_digests().number
        tables, facts = self._tables(comm)
        self._replicas = ReplicaComparison(
            self.leaves.values(),
            self._options.get("replicas", ReplicaCheck.OFF),
            self._options.get("on_replica_mismatch", "raise"),
            comm,
        )
        # Without tables a number is exchanged, and the digests follow by themselves.
        replicas = self._replicas.digests_of_rank() if facts.plan_number is None else None
        return tables, facts._replace(common=common, replicas=replicas)

    def _common_digests(self) -> CommonDigests:
        if self._digests is None:
            preprocess = self._options.get("preprocess_common_before_consistancy_check")
            self._digests = CommonDigests(self.common, preprocess)
        return self._digests

    def _tables(self, comm: Comm) -> tuple[Mapping[str, ShardTable], RankFacts]:
        assert isinstance(self.strategy, PlannedSaveStrategy)
        if self.strategy.share_replicas is not None:
            # Its tables depend on what the ranks have that share replicas.
            return {}, RankFacts(self._destination, plan_number=0)
        self._planning = self._start_planning(comm)
        return self._planning.facts_of_rank()

    def _start_planning(self, comm: Comm) -> SavePlanning:
        assert isinstance(self.strategy, PlannedSaveStrategy)
        cache, others = self._options.get("plan_cache"), self.objects.values()
        planning = self.strategy.planning(
            self.leaves, self.writer, comm, cache=cache, others=others
        )
        planning.destination = self._destination
        return planning

    def agree_on_plan(self, exchanged: ExchangedTables[RankFacts], comm: Comm) -> None:
        """Plan from the tables of all ranks. Collective.

        An error of this rank in planning is kept for ``claim``, which raises it on all ranks.
        """
        if len({facts.common for facts in exchanged.facts}) > 1:
            compare_common_state(self._common_digests, comm)
        self._plan_from_tables(exchanged, comm)
        assert self._replicas is not None
        self._replicas.compare([facts.replicas for facts in exchanged.facts])
        # They hold on to the caller's state.
        self._planning = self._replicas = self._digests = None
        base = self._options.get("base")
        if base is not None:
            self._share_with(base, comm)

    def _plan_from_tables(self, exchanged: ExchangedTables[RankFacts], comm: Comm) -> None:
        planning = self._planning
        if planning is None:
            planning = self._start_planning(comm)
            tables = planning.exchange(comm)
        else:
            tables = planning.exchange(comm, exchanged)

        def plan() -> None:
            self._plan, self.index, self._others = planning.plan_from_tables(tables)
            self.planner = planning.planner

        self._planned = Outcome.of(PLANNING, plan)

    def _share_with(self, base: str | PathLike[str], comm: Comm) -> None:
        """Let the writer share files of a base, if its format is that of the save. Collective.

        Where the chunks of the base make up larger ones of the save, it is cut like the base.
        """
        require_local(self.folder, "an incremental save")
        path = as_local_folder(base).absolute()
        # A planner of a user may know what it has planned to the last item.
        planner = self.planner
        is_ours = planner is not None and planner.settings is not None and not planner.makes_data
        index = self.index if is_ours and isinstance(self.writer.layout, RowBlockLayout) else None
        form = self.strategy.backend, self.strategy.version
        grids = comm.from_rank0(
            "looking at the base", lambda: base_grids(path, self.folder, form, index)
        )
        self.writer.base = None if grids is None else path
        if grids and self._plan is not None and self.index is not None:
            table, self.index = along_grids(self._plan.table, self.index, grids)
            self._plan = replace(self._plan, table=table, index=self.index)

    # The folder.

    def claim(self, comm: Comm, *, durable: bool = False) -> None:
        """Claim the folder, if all ranks have planned. Collective.

        If not ``durable``, nobody waits for the disk here, and ``make_durable`` must follow.
        """
        self._claimed = comm.from_rank0(
            "claiming the folder",
            lambda: self._begin_attempt(comm.world_size, durable=durable),
            after=self._planned,
        )
        if self._disks is not None:
            with comm.agreed("claiming the folder on every disk"):
                if self._disks.leads and comm.rank:
                    self._hooks.before_claim(self.index)
                    attempt = Attempt.begin(
                        self.folder,
                        self._claimed.creates,
                        overwrite=self._options.get("overwrite", False),
                        durability=self._durability,
                        name=self._claimed.attempt,
                    )
                    self._note_attempt(attempt, durable=durable)
        data_folder = self.folder / self._claimed.data
        if data_folder != self.data_folder:
            self.writer.checkpoint_dir = data_folder  # type: ignore[assignment]
            self.writer.reset(data_folder)
        self.data_folder = data_folder

    def _begin_attempt(self, world_size: int, *, durable: bool) -> ClaimedFolder:
        self._hooks.before_claim(self.index)
        objects = sorted(set(self._others.key_column))
        names = [SEAL_NAME, *self._common_writer.created_names(objects)]
        if self.index is not None:
            names += self.writer.created_names(self.index, world_size=world_size)
            refuse_shared_keys(self.index, self._others)
        check_distinct(names)
        if self._disks is not None:
            names.append(PARTS_NAME)
        overwrite = self._options.get("overwrite", False)
        attempt = begin_attempt(self.folder, names, self._durability, overwrite=overwrite)
        self._note_attempt(attempt, durable=durable)
        data = relative(attempt.folder, self.folder)
        creates = () if self._disks is None else attempt.creates
        return ClaimedFolder(attempt.id, str(self.folder), data, self._config, creates)

    def _note_attempt(self, attempt: Attempt | StoreAttempt, *, durable: bool) -> None:
        self._attempt = attempt
        self._hooks.after_claim(attempt.id)
        if durable:
            attempt.make_durable()

    def make_durable(self, comm: Comm) -> None:
        """Make durable what a crash must not lose, before a byte is written. Collective."""
        with comm.agreed("claiming the folder"):
            if self._attempt is not None:
                self._attempt.make_durable()
            self.check_claim()

    def check_claim(self) -> None:
        """Refuse a rank that does not see what rank 0 has claimed, or saves otherwise."""
        claimed, folder, rank = self._claimed, self.data_folder, self.rank
        if rank == 0:
            return
        if self._config != claimed.config:
            finding = Finding(
                "ranks save in different formats",
                expected=f"{claimed.config}, as on rank 0",
                found=self._config,
                ranks=(rank,),
                remedy="Pass the same strategies on every rank.",
            )
            raise CheckpointingException("the ranks do not save the same checkpoint", [finding])
        deadline, pause = time.monotonic() + seal.VISIBLE_SECONDS, 0.001
        while not is_in_attempt(folder, claimed.attempt):
            if time.monotonic() > deadline:
                finding = Finding(
                    "this rank does not see the folder that rank 0 has claimed",
                    expected=f"{claimed.folder}, as on rank 0",
                    found=str(folder.absolute()),
                    ranks=(rank,),
                    path=str(folder / ATTEMPT_NAME),
                    remedy="Save to a file system that all ranks share, under the same path.",
                )
                raise CheckpointingException("the ranks do not save into one folder", [finding])
            # A network file system may show a new file a little later.
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    # Copies, for a save in the background.

    def acquire_buffers(self, buffers: StagingBuffers, comm: Comm) -> None:
        """Get ready to copy. The first thing in the body of an agreement."""
        self.prepare_write(comm)
        buffers.take()
        self._buffers = buffers

    def release_buffers(self) -> None:
        """Free the buffers for the next save."""
        if self._buffers is not None:
            self._buffers.give_back()
            self._buffers = None

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """The caller's tensors that ``capture`` may copy, by key, or by path in common state."""
        tensors: dict[str, list[torch.Tensor]] = {}
        common, _ = flatten(self.common if self.rank == 0 else {})
        named = [(leaf.key, leaf.data) for leaf in self.leaves.values()]
        for name, value in [*named, *((path_text(path), v) for path, v in common.items())]:
            if isinstance(value, torch.Tensor):
                tensors.setdefault(name, []).append(value)
        return tensors

    def capture(self) -> None:
        """Copy what this rank will write, and drop the caller's state. Not collective."""
        assert self._buffers is not None
        with self.meter.phase("copying"):
            self.meter.expect(self.num_bytes)
            self.common = detached_copy(self.common) if self.rank == 0 else {}
            if self.objects:
                self._nested_objects = self._parts.nested(_copied_objects(self.objects))
            self._copy_leaves(self._buffers)
            self._drop_leaves()
            self.meter.add(self.num_bytes)

    def _drop_leaves(self) -> None:
        del self._parts
        self.leaves, self.objects = {}, {}

    def _copy_leaves(self, buffers: StagingBuffers) -> None:
        assert self._local_plan is not None
        assert self.planner is not None
        self.planner = stage_plan(self._local_plan, self.planner, buffers)

    # Writing.

    def write(self, comm: Comm) -> None:
        """Write everything but the commit, from the caller's own state. Collective."""

        def write_local() -> None:
            self.prepare_write(comm)
            self.check_claim()
            self.write_local()

        self._gather(comm, write_local)
        # What describes the whole takes memory, and needs none of this.
        self._drop_leaves()
        self.common, self._nested_objects = {}, None
        self.planner = self._plan = self._local_plan = None

    def start_async_save(self, comm: Comm) -> AsyncRequest:
        """Copy the state, and return what writes and commits the copies. Collective."""
        with comm.agreed("copying the state"):
            self.acquire_buffers(StagingBuffers(), comm)
            self.check_claim()
            self.capture()
        return AsyncRequest(self.write_behind, (), [lambda: self.finish(comm)])

    def prepare_write(self, comm: Comm) -> None:
        """Let the writer change what this rank will write; see ``driver.prepare_write``."""
        assert self._plan is not None
        self._local_plan = driver.prepare_write(self._plan, self.writer, comm)

    def write_local(self) -> None:
        """Write what this rank has to write. Not collective."""
        self._written = None
        with self.meter.phase("writing"):
            self.meter.expect(self.num_bytes)
            files = self._write_common()
            written = self._write_leaves()
        self._written = replace(written, files=(*written.files, *files))

    def write_behind(self) -> None:
        """Like ``write_local``, in a thread: an error is kept for ``finish``."""
        if self._error is None:
            try:
                self.write_local()
            except Exception as error:  # noqa: BLE001 - all ranks must hear of it
                self._error = error

    def lose(self, error: Exception) -> None:
        """Let ``finish`` raise this: there is no usable copy, and no second try would help."""
        self._error, self._is_lost = error, True

    def _write_common(self) -> list[SealedFile]:
        folder, files = self.data_folder, list[SealedFile]()
        if self.rank == 0:
            files += self._common_writer.save_common(self.common, folder) or ()
        if self._nested_objects is not None:
            files += self._common_writer.save_sharded_objects(self._nested_objects, folder) or ()
        return files

    def _write_leaves(self) -> driver.Written:
        assert self._local_plan is not None
        assert self.planner is not None
        return driver.write_plan(self._local_plan, self.planner, self.writer, self.rank)

    def _result_of_rank(self) -> driver.Written:
        """What this rank has written, or the error that kept it from that."""
        if self._error is not None:
            raise self._error
        if self._written is None:
            raise CheckpointingException("a rank stopped writing", [Finding("wrote only a part")])
        # Ranks could mix up two saves that they finish later.
        text = f"{self._claimed.attempt} {self.step}"
        return replace(self._written, save=xxhash.xxh3_64_intdigest(text.encode()) >> 2)

    def _gather(self, comm: Comm, write: Callable[[], None] = lambda: None) -> None:
        """Learn what all ranks have written. Collective."""

        def result_of_rank() -> driver.Written:
            write()
            return self._result_of_rank()

        self._of_ranks = driver.gather_written(result_of_rank, self.writer, comm)

    def finish(self, comm: Comm) -> None:
        """Commit what ``write_behind`` has written on all ranks. Collective."""
        try:
            self._gather(comm)
            self.commit(comm)
        except BaseException as error:
            self.give_up(error)
            raise

    def start_over(self, comm: Comm) -> None:
        """Get ready to write the same copies once more, after ``give_up``. Collective."""
        with comm.agreed("writing once more"):
            if self._is_lost:
                assert self._error is not None
                raise self._error
        # The folder was cleared away: claim it again, and get ready again.
        self.claim(comm)
        self.make_durable(comm)
        self._error = None
        with comm.agreed("writing once more"):
            self.prepare_write(comm)

    # The end.

    def commit(self, comm: Comm) -> None:
        """Write what describes the whole, and turn it into a checkpoint. Collective."""
        part = self._attempt if isinstance(self._attempt, Attempt) else None
        if self._disks is not None:
            self._disks.make_part_durable(part, self._durability, comm)
        with self.meter.phase("committing"), comm.agreed("committing"):
            self._require_one_save([written.save for written in self._of_ranks])
            if self._attempt is not None and self.rank == 0:
                (files, tables), created = self._describe_whole()
                write_seal(
                    self.data_folder,
                    self._config,
                    files,
                    tables=tables,
                    created=created,
                    durability=self._durability,
                    is_all_here=self._disks is None,
                )
                self._attempt.commit(self._config)
        if self._disks is not None:
            self._attempt = None  # nothing is removed from here on
            self._disks.commit_part(part, self._config, self._durability, comm)
        self.meter.log()

    def _describe_whole(self) -> tuple[driver.Finished, Sequence[str] | None]:
        """Write it, on rank 0; also all names that the save may have made, if they are known."""
        assert self.index is not None
        assert self._attempt is not None
        finished = driver.finish_all(self.index, self._of_ranks, self.writer)
        return finished, self._attempt.creates

    def _require_one_save(self, saves: Collection[int]) -> None:
        if len(set(saves)) > 1:
            finding = Finding(
                "ranks finalize different saves, or named different steps",
                path=str(self.folder),
                remedy="Every rank makes the same calls in the same order.",
            )
            raise CheckpointingException("the staged data is not of one save", [finding])

    def give_up(self, error: BaseException) -> None:
        """Clear away what was written, if all ranks have stopped; else leave it to the next save.

        Args:
            error: what ended the save. An interrupt is no agreement, and nobody knows what a rank
                does that does not answer: they may still write, and what they wrote must stay named
                as ours. (Should all but the last agreement have come about, a checkpoint stays.)
        """
        if self._attempt is None:
            return
        is_silent = isinstance(error, RankFailedError) and bool(error.silent_ranks)
        if isinstance(error, CheckpointingException) and not is_silent:
            self._attempt.abandon()
        else:
            self._attempt.release()
        self._attempt = None


class UnplannedSaveJob(SaveJob):
    """A save by a third party's strategy, which is handed the leaves and writes by itself."""

    def _split(self, state_dict: ShardedStateDict) -> None:
        super()._split(state_dict)
        self._nested_leaves = self._parts.nested(self.leaves)
        self._finalize_fns: Sequence[Callable[[], None]] = ()

    def _tables(self, comm: Comm) -> tuple[Mapping[str, ShardTable], RankFacts]:
        tables = {"objects": describe(list(self.objects.values()), comm.rank)}
        if self._validates:
            shards = describe(list(self.leaves.values()), comm.rank)
            tables = {"shards": shards, **tables}
        return tables, RankFacts(self._destination)

    def _plan_from_tables(self, exchanged: ExchangedTables[RankFacts], comm: Comm) -> None:
        del comm
        self._planned = Outcome.of(PLANNING, lambda: self._check_tables(exchanged))

    def _check_tables(self, exchanged: ExchangedTables[RankFacts]) -> None:
        check_one_destination([facts.destination for facts in exchanged.facts])
        for kind in ("shards", "objects") if self._validates else ("objects",):
            self._others = exchanged.catalog(kind)
            check_coverage(self._others, main_rows(self._others))

    def prepare_write(self, comm: Comm) -> None:
        pass

    def _copy_leaves(self, buffers: StagingBuffers) -> None:
        """Copy all tensors and objects: the strategy alone knows what it writes."""
        leaves = self.leaves
        tensors = {
            p: leaf.data for p, leaf in leaves.items() if isinstance(leaf.data, torch.Tensor)
        }
        sizes = [tensor.nbytes for tensor in tensors.values()]
        copies = dict(zip(tensors, buffers.fill(sizes, tensors.values()), strict=True))
        copied = _copied_objects(leaves)
        for path, leaf in copied.items():
            if isinstance(leaf, ShardedTensor):
                leaf.data = copies.get(path)
        self._nested_leaves = self._parts.nested(copied)

    def write(self, comm: Comm) -> None:
        with self.meter.phase("writing"):
            self._write_common_first(comm)
            with comm.agreed("writing"):
                self.strategy.save(self._nested_leaves, self.data_folder)

    def _write_common_first(self, comm: Comm) -> None:
        """By itself: a strategy that talks to other ranks must find all of them there."""
        with comm.agreed("writing the common state"):
            self.check_claim()
            self._write_common()

    def start_async_save(self, comm: Comm) -> AsyncRequest:
        assert isinstance(self.strategy, AsyncSaveShardedStrategy)
        self._write_common_first(comm)
        with comm.agreed("writing"):
            request = self.strategy.async_save(self._nested_leaves, self.data_folder)
        self._written = driver.Written()
        request.add_finalize_fn(lambda: self.finish(comm))
        return request

    def _write_leaves(self) -> driver.Written:
        if isinstance(self.strategy, AsyncSaveShardedStrategy):
            request = self.strategy.async_save(self._nested_leaves, self.data_folder)
            request.execute()
            self._finalize_fns = tuple(request.finalize_fns)
        else:
            self.strategy.save(self._nested_leaves, self.data_folder)
        return driver.Written()

    def _gather(self, comm: Comm, write: Callable[[], None] = lambda: None) -> None:
        del write
        saves = comm.exchange("writing", lambda: self._result_of_rank().save, lambda save: save)
        self._require_one_save(saves)
        for finalize in self._finalize_fns:
            with comm.agreed("finishing the write"):
                finalize()

    def _describe_whole(self) -> tuple[driver.Finished, Sequence[str] | None]:
        return ((), {}), None  # what it creates is not known: all that is there is sealed


def _copied_objects(leaves: Leaves) -> dict[Any, ShardedBase]:
    """Leaves of their own, with copies of the objects that will be written."""
    result: dict[Any, ShardedBase] = {}
    for path, leaf in leaves.items():
        copied = result[path] = leaf.without_data()
        if not isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            copied.data = detached_copy(leaf.data)
    return result
