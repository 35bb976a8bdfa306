"""What is checked before a save touches its folder, and that all ranks write into the same one."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.paths import check_one_destination
from dist_checkpointing.format import seal
from dist_checkpointing.format.commit import (
    CheckpointingConfig,
    check_distinct,
    read_config,
)
from dist_checkpointing.format.gc_pause import paused_collector
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, is_in_attempt
from dist_checkpointing.mapping import is_main_replica
from dist_checkpointing.mapping.nesting import path_text
from dist_checkpointing.mapping.partition import Partition
from dist_checkpointing.planning.coverage import check_coverage, main_rows
from dist_checkpointing.planning.describe import describe
from dist_checkpointing.planning.exchange import exchange_tables
from dist_checkpointing.planning.planners import Leaves
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.options import Checksum
from dist_checkpointing.storage.protocol import StorageWriter
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.planned import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import Selection, select_strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What rank 0 has claimed.

    Attributes:
        attempt: name of the attempt.
        folder: absolute path of the checkpoint on rank 0.
        config: content of the ``metadata.json`` that will be committed.
    """

    attempt: str
    folder: str
    config: CheckpointingConfig

    def check(self, folder: Path, config: CheckpointingConfig, rank: int) -> None:
        """Refuse a rank that does not see the attempt in its own folder, or saves otherwise.

        Raises:
            CheckpointingException: naming the rank.
        """
        if rank == 0:
            return
        if config != self.config:
            finding = Finding(
                "ranks save in different formats",
                expected=f"{self.config}, as on rank 0",
                found=config,
                ranks=(rank,),
                remedy="Pass the same strategies on every rank.",
            )
            raise CheckpointingException("the ranks do not save the same checkpoint", [finding])
        deadline, pause = time.monotonic() + seal.VISIBLE_SECONDS, 0.001
        while not is_in_attempt(folder, self.attempt):
            if time.monotonic() > deadline:
                finding = Finding(
                    "this rank does not see the folder that rank 0 has claimed",
                    expected=f"{self.folder}, as on rank 0",
                    found=str(folder.absolute()),
                    ranks=(rank,),
                    path=str(folder / ATTEMPT_NAME),
                    remedy="Save to a file system that all ranks share, under the same path.",
                )
                raise CheckpointingException("the ranks do not save into one folder", [finding])
            # A network file system may show a new file a little later.
            time.sleep(pause)
            pause = min(1.0, 2 * pause)


def check_data(parts: Partition) -> None:
    """Refuse main replicas without data."""
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


def check_leaves(leaves: Leaves, folder: Path, saved_as: str, comm: Comm) -> ShardTable:
    """Check the coverage of leaves that our planner does not see; the catalog. Collective."""

    @paused_collector()
    def describe_own() -> tuple[dict[str, ShardTable], tuple[str, str]]:
        return {"shards": describe(list(leaves.values()), comm.rank)}, (str(folder), saved_as)

    exchanged = exchange_tables(comm, "describing the shards", describe_own)
    with comm.agreed("checking the shards"), paused_collector():
        check_one_destination(exchanged.facts)
        catalog = exchanged.catalog("shards")
        check_coverage(catalog, main_rows(catalog))
    return catalog


def _ranks_with(table: ShardTable, key: str) -> tuple[int, ...]:
    return tuple(table.ranks_of(np.array(table.key_column) == key).tolist())


def refuse_clashes(names: list[str], objects: ShardTable, index: Index | None) -> None:
    """Refuse names of files that clash, and keys that are tensors and objects at once."""
    findings = []
    if index is not None:
        findings = [
            Finding(
                "is a ShardedTensor on some ranks and a ShardedObject on others",
                key,
                ranks=_ranks_with(objects, key),
                remedy="Rename one of them.",
            )
            for key in sorted(set(objects.key_column))
            if key in index
        ]
    if findings:
        raise InvalidShardingError("keys of the state dict clash", findings)
    check_distinct(names)


def require_sharing_strategy(selection: Selection[SaveShardedStrategy]) -> None:
    """Refuse a strategy whose checkpoints cannot share files.

    Raises:
        UnsupportedFormatError: naming the strategy.
        StrategyNotFoundError: if there is no such strategy.
    """
    strategy = select_strategy(StrategyAction.SAVE_SHARDED, selection).resolved()
    writer = strategy.make_writer(Path()) if isinstance(strategy, PlannedSaveStrategy) else None
    require_sharing(strategy, writer)


def require_sharing(strategy: SaveShardedStrategy, writer: StorageWriter | None) -> None:
    """Refuse a base for a strategy that cannot share files with it.

    Raises:
        UnsupportedFormatError: naming the strategy.
    """
    if writer is None or not writer.shares_files:
        finding = Finding(
            "checkpoints of this format do not share files",
            expected="the backend tensorstore or zarr",
            found=f"{strategy.backend} {strategy.version}",
            remedy="Save without a base, or with one of these backends.",
        )
        raise UnsupportedFormatError("the checkpoint cannot be incremental", [finding])
    if writer.options.checksum is Checksum.NONE:
        finding = Finding(
            "parts are compared by their digests, and none are made",
            remedy="Save with StorageOptions(checksum=Checksum.XXH3).",
        )
        raise UnsupportedFormatError("the checkpoint cannot be incremental", [finding])


def usable_base(base: Path, folder: Path, config: CheckpointingConfig) -> bool:
    """Whether the format of a base is that of the save; if not, the log says so.

    Raises:
        CheckpointNotFoundError: if the base is no checkpoint.
        CheckpointingException: if it is the folder that is written.
    """
    if base.resolve() == folder.resolve():
        finding = Finding(
            "the base is the folder of the save itself",
            path=str(folder),
            remedy="Save into another folder.",
        )
        raise CheckpointingException("a checkpoint cannot be its own base", [finding])
    found = read_config(base)
    stored = (found.sharded_backend, found.sharded_backend_version)
    saved = (config.sharded_backend, config.sharded_backend_version)
    if stored != saved:
        logger.warning("nothing is shared with %s: it is of format %s, not %s", base, stored, saved)
    return stored == saved
