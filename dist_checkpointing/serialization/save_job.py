"""A save up to the point where it only remains to write: prepared, planned, its folder claimed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    RankFailedError,
)
from dist_checkpointing.filesystem.paths import check_one_folder, local_folder
from dist_checkpointing.format import seal
from dist_checkpointing.format.commit import (
    ATTEMPT_NAME,
    CONTENT_METADATA_KEY,
    Attempt,
    CheckpointingConfig,
    check_distinct,
)
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import is_in_attempt
from dist_checkpointing.format.seal import SEAL_NAME, SealedFile, write_seal
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedStateDict,
    is_main_replica,
)
from dist_checkpointing.mapping.nesting import Path as TreePath
from dist_checkpointing.mapping.nesting import path_text
from dist_checkpointing.mapping.partition import Partition, partition
from dist_checkpointing.planning.coverage import check_coverage
from dist_checkpointing.planning.plan_save import PlanCache, PlannedSave
from dist_checkpointing.planning.shard_table import ShardTable, concatenate, describe
from dist_checkpointing.storage.driver import Finished
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.storage.protocol import StorageWriter
from dist_checkpointing.strategies.abstract import require_method
from dist_checkpointing.strategies.base import (
    PlannedSaveStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from dist_checkpointing.strategies.plain_data import check_plain
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import Selection, handles_objects, select
from dist_checkpointing.validation.common_state import compare_common_state
from dist_checkpointing.validation.unwrapped import (
    check_storable,
    refuse_distributed,
    warn_of_large_tensors,
)

logger = logging.getLogger(__name__)


Leaves = Mapping[TreePath, ShardedBase]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaveRequest:
    """What a caller wants saved, and how: the arguments of ``save``.

    Attributes:
        folder: as the caller named it.
        before_claim: called on rank 0 with what the checkpoint will hold (None for third-party
            strategies), before the folder is touched.
        after_claim: called on rank 0 with the name of the attempt, before anything is written.
    """

    state_dict: ShardedStateDict
    folder: str | PathLike[str]
    sharded_strategy: Selection[SaveShardedStrategy] = None
    common_strategy: Selection[SaveCommonStrategy] = None
    validate: bool = True
    preprocess: Callable[[CommonStateDict], CommonStateDict] | None = None
    content_metadata: dict[str, Any] | None = None
    overwrite: bool = False
    plan_cache: PlanCache | None = None
    before_claim: Callable[[Index | None], None] | None = None
    trusted: bool = False
    after_claim: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A save as far as one rank can prepare it alone.

    Attributes:
        strategy: writes ``by_strategy``.
        common_writer: writes ``common`` and ``by_common``.
        folder: of the checkpoint, an absolute path.
        parts: the state dict sorted out.
        common: the common state, ``content_metadata`` included.
        by_strategy: the leaves that the sharded strategy writes.
        by_common: the ShardedObjects, if the sharded strategy does not take them.
        writer: of a planned strategy.
    """

    strategy: SaveShardedStrategy
    common_writer: SaveCommonStrategy
    folder: Path
    parts: Partition
    common: CommonStateDict
    by_strategy: Leaves
    by_common: Leaves
    writer: StorageWriter | None

    @property
    def durability(self) -> Durability:
        """What the strategy asks for."""
        return Durability.FSYNC if self.writer is None else self.writer.options.durability

    @property
    def config(self) -> CheckpointingConfig:
        """What the commit will record."""
        sharded, common = self.strategy, self.common_writer
        return CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version)


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What rank 0 has claimed.

    Attributes:
        attempt: name of the attempt.
        folder: absolute path of the checkpoint on rank 0.
        config: what will be committed.
    """

    attempt: str
    folder: str
    config: CheckpointingConfig


class BegunSave:
    """A save of which only the writing and the commit are left. One object a rank.

    Attributes:
        work: what this rank prepared.
        planned: the plan, of a planned strategy.
        meter: counts what is done.
        rank: whose object it is.
        finished: what the ranks have written, on rank 0, once that is complete.
    """

    def __init__(
        self,
        request: SaveRequest,
        work: Work,
        planned: PlannedSave | None,
        objects: ShardTable,
        meter: Meter,
        rank: int,
    ) -> None:
        self.rank = rank
        self.work, self.planned, self.meter = work, planned, meter
        self._request, self._objects = request, objects
        self._attempt: Attempt | None = None
        self._attempt_id = ""
        self.finished = Finished()
        if work.writer is not None:
            work.writer.report = meter.add

    @property
    def attempt_id(self) -> str:
        """Name of the attempt, the same on every rank."""
        return self._attempt_id

    def claim(self, comm: Comm) -> None:
        """Take possession of the folder. Collective. ``secure`` must follow."""
        claimed = comm.from_rank0("claiming the folder", lambda: self._claim(comm.world_size))
        self._attempt_id = claimed.attempt
        self._claimed = claimed

    def _claim(self, world_size: int) -> _Claimed:
        work = self.work
        attempt = _claim(work, self.planned, self._objects, self._request, world_size)
        self._attempt = attempt
        if self._request.after_claim is not None:
            self._request.after_claim(attempt.id)
        return _Claimed(attempt.id, str(work.folder.absolute()), work.config)

    def secure(self, comm: Comm) -> None:
        """Make durable what a crash must not lose, before a byte is written. Collective.

        Every rank proves that it stands in the folder that rank 0 has claimed, and writes the same
        format.

        Raises:
            CheckpointingException: naming the ranks that do not.
        """
        with comm.agreed("claiming the folder"):
            if self._attempt is not None:
                self._attempt.secure()
            else:
                _require_same(self.work, self._claimed, comm.rank)

    def write_common(
        self, common: CommonStateDict, objects: ShardedStateDict | None, *, is_coordinator: bool
    ) -> list[SealedFile]:
        """Write this rank's part of what the sharded strategy does not take. Not collective.

        Args:
            common: the common state, written on rank 0.
            objects: ShardedObjects in a nest, None for none.
            is_coordinator: whether this is rank 0.
        """
        work = self.work
        files: list[SealedFile] = []
        if is_coordinator:
            files += work.common_writer.save_common(common, work.folder) or ()
        if objects is not None:
            files += work.common_writer.save_sharded_objects(objects, work.folder) or ()
        return files

    def forget_state(self) -> None:
        """Let go of the caller's state dict, of which everything has been copied."""
        self._request = replace(self._request, state_dict={})
        nothing = partition({})
        self.work = replace(self.work, parts=nothing, common={}, by_strategy={}, by_common={})

    def commit(self, comm: Comm) -> None:
        """Turn what was written into a checkpoint. Collective."""
        with self.meter.phase("committing"), comm.agreed("committing"):
            if self._attempt is not None:
                self._seal(self._attempt)
                self._attempt.commit(self.work.config)
        self.meter.log()

    def _seal(self, attempt: Attempt) -> None:
        # What a strategy of somebody else creates is not known: all that lies there is sealed.
        created = attempt.creates if self.planned is not None else None
        write_seal(
            self.work.folder,
            self.work.config,
            self.finished.files,
            tables=self.finished.tables,
            created=created,
            durability=self.work.durability,
        )

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


def begin(request: SaveRequest, comm: Comm, meter: Meter) -> BegunSave:
    """Prepare, plan and check. Collective; touches no file.

    Raises:
        CheckpointingException: see ``save``.
    """
    with meter.phase("planning"):
        with comm.agreed("preparing the save"), paused_collector():
            work = _prepare(request, comm.rank)
        if request.validate:
            compare_common_state(work.common, request.preprocess, comm)
        planned, objects = _plan(work, comm, request.plan_cache, validate=request.validate)
    return BegunSave(request, work, planned, objects, meter, comm.rank)


def _prepare(request: SaveRequest, rank: int) -> Work:
    # Whoever writes may do so when the working directory is another one.
    folder = local_folder(request.folder).absolute()
    selected: SaveShardedStrategy = select(StrategyAction.SAVE_SHARDED, request.sharded_strategy)
    strategy = selected.resolved()
    common_writer: SaveCommonStrategy = select(StrategyAction.SAVE_COMMON, request.common_strategy)
    parts = partition(request.state_dict)
    common = dict(parts.common)
    if request.content_metadata is not None:
        common[CONTENT_METADATA_KEY] = request.content_metadata
    refuse_distributed(replace(parts, common=common), parts.objects)
    _check_data(parts)
    planner = getattr(strategy, "planner", None)
    if planner is None or not planner.makes_data:
        check_storable(parts.tensors)
    written = {p: o for p, o in parts.objects.items() if is_main_replica(o.replica_id)}
    check_plain(common if rank == 0 else {}, written, trusted=request.trusted)
    if rank == 0:
        warn_of_large_tensors(common)
    by_strategy: Leaves = parts.tensors
    by_common: Leaves = parts.objects
    if handles_objects(strategy):
        by_strategy, by_common = {**parts.tensors, **parts.objects}, {}
    if by_common:
        require_method(common_writer, "save_sharded_objects", "writes ShardedObjects")
    writer = None
    if isinstance(strategy, PlannedSaveStrategy):
        writer = strategy.make_writer(folder)
        common_writer = common_writer.lasting(writer.options.durability)
    return Work(strategy, common_writer, folder, parts, common, by_strategy, by_common, writer)


def _plan(
    work: Work, comm: Comm, cache: PlanCache | None, *, validate: bool
) -> tuple[PlannedSave | None, ShardTable]:
    """Decide who writes what: the plan of a planned strategy, and all ranks' ``by_common``."""
    planned = None
    if work.writer is not None:
        assert isinstance(work.strategy, PlannedSaveStrategy)
        planned = work.strategy.plan(
            work.by_strategy, work.writer, comm, cache=cache, others=work.by_common.values()
        )
        if planned.dropped and comm.rank == 0:
            logger.info("left out by the planner: %s", ", ".join(planned.dropped))
        if planned.others is not None:
            return planned, planned.others
    elif validate:
        _check_leaves(work.by_strategy, work.folder, comm)
    return planned, _check_leaves(work.by_common, work.folder, comm)


def _claim(
    work: Work,
    planned: PlannedSave | None,
    objects: ShardTable,
    request: SaveRequest,
    world_size: int,
) -> Attempt:
    """Take possession of the folder, on rank 0."""
    if request.before_claim is not None:
        request.before_claim(None if planned is None else planned.index)
    names = [SEAL_NAME, *work.common_writer.created_names(sorted(set(objects.key_column)))]
    if planned is not None and work.writer is not None:
        names += work.writer.created_names(planned.index, world_size=world_size)
    _refuse_clashes(names, objects, planned)
    return Attempt.begin(
        work.folder, names, overwrite=request.overwrite, durability=work.durability
    )


def _require_same(work: Work, claimed: _Claimed, rank: int) -> None:
    """Refuse a rank that writes another format, or into another folder, than rank 0."""
    if work.config != claimed.config:
        finding = Finding(
            "ranks save in different formats",
            expected=f"{claimed.config}, as on rank 0",
            found=work.config,
            ranks=(rank,),
            remedy="Pass the same strategies on every rank.",
        )
        raise CheckpointingException("the ranks do not save the same checkpoint", [finding])
    deadline, pause = time.monotonic() + seal.VISIBLE_SECONDS, 0.001
    while not is_in_attempt(work.folder, claimed.attempt):
        if time.monotonic() > deadline:
            finding = Finding(
                "this rank does not see the folder that rank 0 has claimed",
                expected=f"{claimed.folder}, as on rank 0",
                found=str(work.folder.absolute()),
                ranks=(rank,),
                path=str(work.folder / ATTEMPT_NAME),
                remedy="Save to a file system that all ranks share, under the same path.",
            )
            raise CheckpointingException("the ranks do not save into one folder", [finding])
        # A network file system may show a new file a little later.
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _check_data(parts: Partition) -> None:
    findings = [
        Finding(
            f"data is None at {path_text(path)}",
            leaf.key,
            remedy="A leaf without data can only be loaded.",
        )
        for path, leaf in parts.tensors.items()
        if leaf.data is None and is_main_replica(leaf.replica_id)
    ]
    if findings:
        raise InvalidShardingError("there is nothing to save for some shards", findings)


def _check_leaves(leaves: Leaves, folder: Path, comm: Comm) -> ShardTable:
    """Check the coverage of leaves that our planner does not see; the catalog. Collective."""

    @paused_collector()
    def describe_own() -> tuple[ShardTable, str]:
        return describe(list(leaves.values()), comm.rank), str(folder)

    exchanged = comm.exchange("describing the shards", describe_own)
    with comm.agreed("checking the shards"), paused_collector():
        tables, folders = zip(*exchanged, strict=True)
        check_one_folder(folders)
        catalog = concatenate(tables)
        check_coverage(catalog, catalog.take(catalog.main & (catalog.num_elements > 0)))
    return catalog


def _ranks_with(table: ShardTable, key: str) -> tuple[int, ...]:
    return tuple(np.unique(table.ranks[np.array(table.key_column) == key]).tolist())


def _refuse_clashes(names: list[str], objects: ShardTable, planned: PlannedSave | None) -> None:
    findings = []
    if planned is not None:
        findings = [
            Finding(
                "is a ShardedTensor on some ranks and a ShardedObject on others",
                key,
                ranks=_ranks_with(objects, key),
                remedy="Rename one of them.",
            )
            for key in sorted(set(objects.key_column))
            if key in planned.index
        ]
    if findings:
        raise InvalidShardingError("keys of the state dict clash", findings)
    check_distinct(names)
