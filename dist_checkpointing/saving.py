"""save: flatten, partition, describe, exchange, check, plan, write, agree, commit."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_checkpointing.catalog import ShardTable, concatenate, describe
from dist_checkpointing.collector import paused_collector
from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.commit import Attempt, CheckpointingConfig, check_distinct
from dist_checkpointing.errors import CheckpointingException, Finding, InvalidShardingError
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedStateDict,
    is_main_replica,
)
from dist_checkpointing.options import Durability
from dist_checkpointing.partition import Partition, partition
from dist_checkpointing.planned_save import PlanCache, PlannedSave
from dist_checkpointing.progress import Meter, ProgressCallback
from dist_checkpointing.storage import StorageWriter
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    PlannedSaveStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import Selection, handles_objects, select
from dist_checkpointing.tree import Path as TreePath
from dist_checkpointing.tree import flatten, path_text
from dist_checkpointing.validation import check_coverage, difference_of_common_state

logger = logging.getLogger(__name__)

CONTENT_METADATA_KEY = "content_metadata"

Leaves = Mapping[TreePath, ShardedBase]


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[SaveShardedStrategy] = None,
    common_strategy: Selection[SaveCommonStrategy] = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], CommonStateDict] | None
    ) = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    comm: Comm | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    plan_cache: PlanCache | None = None,
) -> AsyncRequest | None:
    """Save the state dicts of all ranks as one checkpoint. Collective.

    The checkpoint exists once this returns, durably, and not before. If anything fails on any rank,
    all ranks raise the same error and what was written is removed. The state dict is not changed.

    Args:
        sharded_state_dict: any nest of dicts, lists and tuples. Sharded leaves are saved from
            wherever they are; of everything else ("common state") rank 0's is saved.
        checkpoint_dir: made if it is missing; the same path on every rank.
        sharded_strategy: backend name (its newest version), (name, version), or a strategy; by
            default ("tensorstore", 1).
        common_strategy: likewise, for common state; by default ("torch", 1).
        validate_access_integrity: also compare the common state of all ranks (a difference is
            logged) and, for third-party strategies, check that the shards make up each global
            tensor exactly once. Strategies of this library always check that.
        async_sharded_save: return an AsyncRequest instead of writing the tensors; for strategies
            that are AsyncSaveShardedStrategy.
        preprocess_common_before_consistancy_check: gets a shallow copy of the common state and
            returns what is compared between ranks.
        content_metadata: kept in the common state, see ``load_content_metadata``.
        comm: the ranks that save together; by default all of torch.distributed, or this process.
        overwrite: give up a committed checkpoint at ``checkpoint_dir`` as soon as the new one is
            planned. From then on the old one is gone, also if this save fails.
        progress: called with a Progress, from any thread, whenever there is something to report.
        plan_cache: the same object for every save of one training run: while nothing but values
            has changed, on any rank, the plan of the last save is used again.

    Returns:
        None, or the request to schedule.

    Raises:
        InvalidShardingError: shards that contradict each other, overlap or leave gaps; keys, dtypes
            or leaves that cannot be stored.
        CheckpointExistsError: ``checkpoint_dir`` is not free. Nothing was touched.
        StrategyNotFoundError: no such backend.
        RankFailedError: anything else that failed, such as an I/O error, on the ranks it names.
    """
    comm = default_comm() if comm is None else comm
    meter = Meter("save", comm.rank, progress)
    with meter.phase("planning"), paused_collector(), comm.agreed("preparing the save"):
        work = _prepare(
            sharded_state_dict,
            Path(checkpoint_dir),
            sharded_strategy,
            common_strategy,
            content_metadata,
        )
        if async_sharded_save and not isinstance(work.strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async strategy {work.strategy}"
            )
    with meter.phase("planning"), paused_collector():
        if validate_access_integrity:
            _compare_common(work.common, preprocess_common_before_consistancy_check, comm)
        planned, objects = _plan(work, comm, plan_cache, validate=validate_access_integrity)
        attempt = _claim(work, planned, objects, comm, overwrite=overwrite)

    def commit() -> None:
        with meter.phase("committing"), comm.agreed("committing"):
            if attempt is not None:
                attempt.commit(work.config)
        meter.log()

    if work.writer is not None:
        work.writer.report = meter.add
    try:
        with meter.phase("writing"):
            meter.expect(0 if planned is None else planned.plan.num_bytes)
            request = _write(work, planned, comm, put_off=async_sharded_save)
        if request is None:
            commit()
        else:
            request.add_finalize_fn(commit)
    except CheckpointingException:
        if attempt is not None:
            attempt.abandon()
        raise
    except BaseException:
        # Interrupted: other ranks may still be writing, so nothing is removed under their hands.
        if attempt is not None:
            attempt.release()
        raise
    return request


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A save as far as one rank can prepare it alone.

    Attributes:
        strategy: writes ``by_strategy``.
        common_writer: writes ``common`` and ``by_common``.
        folder: of the checkpoint.
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
    def config(self) -> CheckpointingConfig:
        """What the commit will record."""
        sharded, common = self.strategy, self.common_writer
        return CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version)


def _prepare(
    state_dict: ShardedStateDict,
    folder: Path,
    sharded_strategy: Selection[SaveShardedStrategy],
    common_strategy: Selection[SaveCommonStrategy],
    content_metadata: dict[str, Any] | None,
) -> _Work:
    selected: SaveShardedStrategy = select(StrategyAction.SAVE_SHARDED, sharded_strategy)
    strategy = selected.resolved()
    common_writer: SaveCommonStrategy = select(StrategyAction.SAVE_COMMON, common_strategy)
    parts = partition(state_dict)
    _check_data(parts)
    common = dict(parts.common)
    if content_metadata is not None:
        common[CONTENT_METADATA_KEY] = content_metadata
    by_strategy: Leaves = parts.tensors
    by_common: Leaves = parts.objects
    if handles_objects(strategy):
        by_strategy, by_common = {**parts.tensors, **parts.objects}, {}
    writer = None
    if isinstance(strategy, PlannedSaveStrategy):
        writer = strategy.make_writer(folder)
        common_writer = common_writer.lasting(writer.options.durability)
    return _Work(strategy, common_writer, folder, parts, common, by_strategy, by_common, writer)


def _plan(
    work: _Work, comm: Comm, cache: PlanCache | None, *, validate: bool
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
        _check_leaves(work.by_strategy, comm)
    return planned, _check_leaves(work.by_common, comm)


def _claim(
    work: _Work,
    planned: PlannedSave | None,
    objects: ShardTable,
    comm: Comm,
    *,
    overwrite: bool,
) -> Attempt | None:
    """Take possession of the folder: the attempt on rank 0, None elsewhere."""
    attempt = None
    with comm.agreed("claiming the folder"):
        if comm.rank == 0:
            names = [*work.common_writer.created_names(sorted(set(objects.key_column)))]
            if planned is not None and work.writer is not None:
                names += work.writer.created_names(planned.index)
            _refuse_clashes(names, objects, planned)
            durability = Durability.FSYNC
            if work.writer is not None:
                durability = work.writer.options.durability
            attempt = Attempt.begin(work.folder, names, overwrite=overwrite, durability=durability)
    return attempt


def _write(
    work: _Work, planned: PlannedSave | None, comm: Comm, *, put_off: bool
) -> AsyncRequest | None:
    """Write everything but the commit; with ``put_off`` return the bulk of it as a request."""
    with comm.agreed("writing the common state"):
        if comm.rank == 0:
            work.common_writer.save_common(work.common, work.folder)
        if work.by_common:
            nested = work.parts.nested(work.by_common)
            work.common_writer.save_sharded_objects(nested, work.folder)
    strategy = work.strategy
    if planned is not None and work.writer is not None:
        assert isinstance(strategy, PlannedSaveStrategy)
        strategy.write(planned, work.writer, comm)
        return None
    with comm.agreed("writing"):
        nested = work.parts.nested(work.by_strategy)
        if put_off:
            assert isinstance(strategy, AsyncSaveShardedStrategy)
            return strategy.async_save(nested, work.folder)
        strategy.save(nested, work.folder)
    return None


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


def _check_leaves(leaves: Leaves, comm: Comm) -> ShardTable:
    """Check the coverage of leaves that our planner does not see; the catalog. Collective."""
    tables = comm.exchange(
        "describing the shards", lambda: describe(list(leaves.values()), comm.rank)
    )
    with comm.agreed("checking the shards"):
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


def _compare_common(
    common: CommonStateDict,
    preprocess: Callable[[CommonStateDict], CommonStateDict] | None,
    comm: Comm,
) -> None:
    """Log, on every rank that differs, how its common state differs from rank 0's."""
    if comm.world_size == 1:
        return
    with comm.agreed("comparing the common state"):
        seen = common if preprocess is None else preprocess(dict(common))
        leaves, _ = flatten(seen)
        digests = {path_text(path): _digest(leaf) for path, leaf in leaves.items()}
        text = repr(sorted(digests.items())).encode()
        summary = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    if comm.all_same(summary >> 2):
        return
    difference = difference_of_common_state(comm.broadcast(digests), digests, comm.rank)
    if difference is not None:
        logger.warning("%s", difference)


def _digest(leaf: object) -> bytes:
    """Equal for equal leaves; a pickle alone also depends on which objects are the same one."""
    try:
        if isinstance(leaf, torch.Tensor):
            bits = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

            content = f"{leaf.dtype}{tuple(leaf.shape)}".encode() + bits.numpy().tobytes()
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            content = repr(leaf).encode()
        else:
            content = pickle.dumps(copy.deepcopy(leaf))
    except Exception as error:  # noqa: BLE001 - saving it will fail with a better message
        content = repr(error).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
