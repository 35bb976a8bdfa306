"""Whether ranks agree, and whether a template fits a checkpoint, as Megatron's functions say it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch.distributed as dist

from dist_checkpointing.comm import default_comm
from dist_checkpointing.errors import CheckpointingException, InvalidShardingError
from dist_checkpointing.interop.megatron import state_dicts as nests
from dist_checkpointing.mapping import CommonStateDict, ShardedBase, ShardedStateDict
from dist_checkpointing.planning.coverage import check_coverage
from dist_checkpointing.planning.shard_table import concatenate, describe
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    handles_objects,
)
from dist_checkpointing.strategies.selection import Selection, open_checkpoint
from dist_checkpointing.validation.load_errors import (
    StrictHandling,
    mismatch_text,
    parse_strict_flag,  # noqa: F401 - one of the names that Megatron has here
)

logger: logging.Logger = logging.getLogger(__name__)

Metadata = list[ShardedBase]


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: dist.ProcessGroup | None = None
) -> tuple[Metadata, list[Metadata]]:
    """The leaves of this rank, and of each rank, without their data. Collective."""
    own = [leaf.without_data() for leaf in nests.nested_values(sharded_state_dict)]
    if not dist.is_initialized():
        return own, [own]
    of_ranks: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(of_ranks, own, group=process_group)
    return own, of_ranks


def validate_sharding_integrity(
    global_metadata: Sequence[Metadata], common_state_dict: CommonStateDict | None = None
) -> None:
    """Check on rank 0 that main replicas make up each tensor and object once: InvalidShardingError
    on rank 0 alone. Collective if a common state is given: ranks whose own differs from that of
    rank 0 log it.
    """
    if common_state_dict is not None:
        _validate_common_state_dict(common_state_dict)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    catalog = concatenate([describe(own, rank) for rank, own in enumerate(global_metadata)])
    try:
        check_coverage(catalog)
    except InvalidShardingError as error:
        broken = {f.key for f in error.findings if f.problem.startswith("flattened ranges")}
        first = next((x for own in global_metadata for x in own if x.key in broken), None)
        if first is None:
            raise
        message = f"Flattened ranges dont cover the whole shard {first}"
        raise InvalidShardingError(message, error.findings) from error


def _validate_common_state_dict(common_state_dict: CommonStateDict) -> None:
    if not dist.is_initialized():
        return
    comm = default_comm()
    reference = comm.broadcast(common_state_dict)
    with comm.agreed("comparing the common state"):
        only_first, only_own, different = nests.diff(reference, common_state_dict)
        if comm.rank and (only_first or only_own or different):
            logger.warning(
                "Rank %d common state dict differs from rank 0 common state dict. Keys only on "
                "rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
                *(comm.rank, only_first, comm.rank, only_own, different),
            )


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Metadata | None = None,
    global_metadata: Sequence[Metadata] | None = None,
    ckpt_sharded_metadata: Mapping[str, Any] | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """The template without unexpected keys, the missing keys, and the unexpected ones;
    CheckpointingException for keys that the flag does not allow, or metadata that it needs.
    """
    missing, unexpected = set[str](), set[str]()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise CheckpointingException(
                "Cannot verify checkpoint mismatch with ckpt_sharded_metadata=None."
            )
        own = nests.nested_values(sharded_state_dict) if local_metadata is None else local_metadata
        stored = {leaf.key for leaf in ckpt_sharded_metadata.values()}
        unexpected = {leaf.key for leaf in own} - stored
        if StrictHandling.requires_global_app_metadata(strict) and global_metadata is not None:
            missing = stored - {leaf.key for of_rank in global_metadata for leaf in of_rank}
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, unexpected)
        if strict == StrictHandling.IGNORE_ALL:
            missing, unexpected = set(), set()
        elif not StrictHandling.requires_returning_mismatch_keys(strict):
            raises = strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
            maybe_report_missing_and_unexpected_keys(missing, unexpected, raises)
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException(
                "Cannot check sharding integrity without global_metadata (None)."
            )
        validate_sharding_integrity(global_metadata)
    return sharded_state_dict, missing, unexpected


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    if not missing_keys and not unexpected_keys:
        return
    if raise_error:
        raise CheckpointingException(mismatch_text(missing_keys, unexpected_keys))
    logger.warning("%s", mismatch_text(missing_keys, unexpected_keys))


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    kept: ShardedStateDict = nests.extract_matching_values(
        sharded_state_dict, lambda leaf: leaf.key in sharded_keys_to_remove
    )[1]
    return kept


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    common_strategy: Selection[LoadCommonStrategy] = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    found = open_checkpoint(checkpoint_dir, sharded_strategy, common_strategy)
    return found.sharded, found.common


def validate_sharded_objects_handling(sharded_strategy: Any, common_strategy: Any) -> None:
    if not handles_objects(sharded_strategy) and not handles_objects(common_strategy):
        raise CheckpointingException(
            f"neither {sharded_strategy} nor {common_strategy} takes ShardedObjects"
        )
