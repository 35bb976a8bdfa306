"""What is checked before a save touches its folder, and that all ranks write into the same one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import require_local
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import seal
from dist_checkpointing.format.commit import CheckpointingConfig, check_distinct
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, is_in_attempt
from dist_checkpointing.mapping import CommonStateDict, is_main_replica
from dist_checkpointing.mapping.nested_dicts import path_text
from dist_checkpointing.mapping.state_dict_parts import Partition
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.safe_pickle import check_plain
from dist_checkpointing.validation.unwrapped import check_storable, warn_of_large_tensors


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """What the ranks have decided.

    Attributes:
        objects: The ShardedObjects of all ranks that the common strategy writes.
        plan: What this rank writes; None for a third party's strategy.
        index: What the checkpoint will hold; None for a third party's strategy.
        planner: Answers for the data of the plan.
    """

    objects: ShardTable
    plan: SavePlan | None = None
    index: Index | None = None
    planner: SavePlanner | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
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
    creates: tuple[str, ...] = ()

    def check(self, folder: Location, config: CheckpointingConfig, rank: int) -> None:
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


def take_fingerprints(strategy: SaveShardedStrategy, writer: StorageWriter | None) -> None:
    """Let a writer take fingerprints, if the format has a place for them.

    Raises:
        UnsupportedFormatError: naming the format.
    """
    if writer is None or not writer.keeps_fingerprints:
        finding = Finding(
            "the format has no place for fingerprints",
            found=f"{strategy.backend} {strategy.version}",
            remedy="Save with tensorstore or zarr 2, or compute them from what is stored.",
        )
        raise UnsupportedFormatError("fingerprints cannot be kept", [finding])
    writer.takes_fingerprints = True


def check_place(
    folder: Location,
    strategy: SaveShardedStrategy,
    writer: StorageWriter | None,
    *,
    is_shared: bool = True,
) -> None:
    """Refuse an object store, and disks of some ranks, for a strategy that needs a shared folder.

    Raises:
        UnsupportedFormatError: naming the strategy.
    """
    if writer is not None and writer.uses_object_stores:
        return
    backend = f"the backend {strategy.backend} {strategy.version}"
    require_local(folder, backend)
    if not is_shared:
        finding = Finding(
            f"{backend} writes into a folder that all ranks see",
            path=str(folder),
            remedy="Pass a disk that all ranks share, or save with tensorstore.",
        )
        raise UnsupportedFormatError("each machine has a disk of its own", [finding])


def check_values(
    strategy: SaveShardedStrategy, parts: Partition, common: CommonStateDict, *, trusted: bool
) -> None:
    """Refuse values that could not be loaded, and tell of large ones in the common state."""
    check_data(parts)
    planner = getattr(strategy, "planner", None)
    if planner is None or not planner.makes_data:
        check_storable(parts.tensors)
    written = {path: o for path, o in parts.objects.items() if is_main_replica(o.replica_id)}
    check_plain(common, written, trusted=trusted)
    warn_of_large_tensors(common)


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


def require_one_save(saves: Iterable[int], folder: Location) -> None:
    """Refuse to end a save together with ranks that end another one.

    Args:
        saves: number of the save of each rank.
        folder: of the checkpoint.

    Raises:
        CheckpointingException: if they differ.
    """
    if len(set(saves)) > 1:
        finding = Finding(
            "ranks finalize different saves, or named different steps",
            path=str(folder),
            remedy="Every rank makes the same calls in the same order.",
        )
        raise CheckpointingException("the staged data is not of one save", [finding])


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
