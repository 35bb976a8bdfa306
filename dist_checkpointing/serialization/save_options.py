"""The keywords of saves, with their types: each kind of save takes some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict

from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import CommonStateDict
from dist_checkpointing.planning.replica_check import OnReplicaMismatch, ReplicaCheck
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.serialization.disk_parts import Disks
from dist_checkpointing.storage.progress import ProgressOption
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection

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


class JobOptions(SaveOptions, total=False):
    """What a SaveJob can be told; ``save`` describes each."""

    sharded_strategy: Selection[SaveShardedStrategy]
    common_strategy: Selection[SaveCommonStrategy]
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], CommonStateDict] | None
    plan_cache: PlanCache | None


class AsyncSaveOptions(SaveOptions, total=False):
    """Keywords of ``async_save`` and ``AsyncSaver.save``. All may be left out.

    Attributes:
        validate_access_integrity: See ``save``.
        content_metadata: See ``save``.
        overwrite: See ``save``.
        trusted: See ``save``.
        base: See ``save``.
        fingerprints: See ``save``.
        replicas: See ``save``.
        on_replica_mismatch: See ``save``.
        progress: See ``save``.
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
