"""save: the whole line from the state dict to the committed checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any, Unpack

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.torch_distributed import chosen_comm
from dist_checkpointing.mapping import CommonStateDict, ShardedStateDict, ShardedStateful
from dist_checkpointing.planning.recipe import Recipe
from dist_checkpointing.planning.replica_check import OnReplicaMismatch, ReplicaCheck
from dist_checkpointing.planning.save_plan import PlanCache
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.serialization.save_steps import JobOptions, SaveJob, require_known
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies.async_calls import AsyncRequest
from dist_checkpointing.strategies.base import SaveCommonStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.selection import Selection


def save(
    sharded_state_dict: ShardedStateDict | ShardedStateful,
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
    progress: ProgressOption | None = None,
    plan_cache: PlanCache | None = None,
    trusted: bool = False,
    base: str | PathLike[str] | None = None,
    fingerprints: bool = False,
    replicas: ReplicaCheck = ReplicaCheck.OFF,
    on_replica_mismatch: OnReplicaMismatch = "raise",
    recipe: Recipe | None = None,
) -> AsyncRequest | None:
    """Save the state dicts of all ranks as one checkpoint. Collective.

    The checkpoint exists once this returns, durably, and not before. If anything fails on any rank,
    all ranks raise the same error and what was written is removed. The state dict is not changed.

    Args:
        sharded_state_dict: any nest of dicts, lists and tuples. Sharded leaves are saved from
            wherever they are; of everything else ("common state") rank 0's is saved. Or a
            ShardedStateful, such as ``interop.TorchState``.
        checkpoint_dir: a folder, made if it is missing, or a URL such as ``s3://bucket/run/1000``;
            the same on every rank.
        sharded_strategy: backend name (its newest version), (name, version), or a strategy; by
            default ("tensorstore", 1).
        common_strategy: likewise, for common state; by default ("torch", 1).
        validate_access_integrity: also compare the common state of all ranks (tensors that differ
            are an error, other values are logged) and, for third-party strategies, check that the
            shards make up each global tensor exactly once. Strategies of this library always check
            that.
        async_sharded_save: copy what is to be saved and return an AsyncRequest, for an
            AsyncCallsQueue, that does the rest; ``async_save`` is the simpler way. For strategies
            of this library and those that are AsyncSaveShardedStrategy.
        preprocess_common_before_consistancy_check: gets a shallow copy of the common state and
            returns what is compared between ranks.
        content_metadata: kept in the common state, see ``load_content_metadata``.
        comm: the ranks that save together; by default all of torch.distributed, or this process.
        overwrite: give up a committed checkpoint at ``checkpoint_dir`` as soon as the new one is
            planned. From then on the old one is gone, also if this save fails.
        progress: called with a Progress, from any thread, whenever there is something to report;
            or ``"bar"``: rank 0 shows its own part on the standard error.
        plan_cache: the same object for every save of one training run: while nothing but values
            has changed, on any rank, the plan of the last save is used again.
        trusted: save anything that pickles. What is no plain data can be loaded with
            ``trusted=True`` only, and is refused here without it.
        base: folder of an earlier checkpoint. What it holds already, with the same key, place and
            128-bit digest, is not written again: its files get a second name in the new folder (a
            hard link, or a copy by the kernel). Both checkpoints are whole, and either may be
            deleted. For the backends ``tensorstore`` and ``zarr``, with checksums. What is in
            another format, without digests, or damaged is written; the log says so.
        fingerprints: keep the fingerprint of every tensor, see ``fingerprint``, in the index of the
            checkpoint. For strategies of this library that have an index: tensorstore and zarr 2.
        replicas: compare the copies that several ranks hold of the same part of a tensor, before
            anything is written: all of them, or another sixteenth at each save of these ranks.
        on_replica_mismatch: if such copies differ, raise an error (``"raise"``), or log it and save
            what the writers hold (``"warn"``).
        recipe: save what these rules make of the sharded leaves of all ranks, such as the names and
            the layout of Hugging Face. What a rule casts is cast while it is
            written.

    Returns:
        None, or the request to schedule.

    Raises:
        InvalidShardingError: shards that contradict each other, overlap or leave gaps; keys, dtypes
            or leaves that cannot be stored; sharded tensors of torch that are not wrapped; tensors
            in the common state, or replicas, that differ between ranks.
        UnsupportedFormatError: values that ``load`` would refuse; a backend or a base that is for
            disks only; a base for a strategy that cannot share files; fingerprints for a format
            that does not keep them.
        CheckpointNotFoundError: ``base`` is no checkpoint.
        CheckpointExistsError: ``checkpoint_dir`` is not free. Nothing was touched.
        CheckpointingException: this process may not write there, or the disk is too full.
        StrategyNotFoundError: no such backend.
        StateMismatchError: a rule of the recipe does not fit what is saved.
        RankFailedError: anything else that failed, such as an I/O error, on the ranks it names.

    Example:
        >>> weight = ShardedTensor.from_rank_offsets("decoder.weight", torch.ones(4, 3))
        >>> save({"weight": weight, "step": 1000}, "ckpt/1000")
        >>> sorted(load_tensors_metadata("ckpt/1000"))
        ['decoder.weight']
    """
    return save_with_hooks(
        SaveHooks(),
        sharded_state_dict,
        checkpoint_dir,
        comm=comm,
        progress=progress,
        sharded_strategy=sharded_strategy,
        common_strategy=common_strategy,
        validate_access_integrity=validate_access_integrity,
        async_sharded_save=async_sharded_save,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        overwrite=overwrite,
        plan_cache=plan_cache,
        trusted=trusted,
        base=base,
        fingerprints=fingerprints,
        replicas=replicas,
        on_replica_mismatch=on_replica_mismatch,
        recipe=recipe,
    )


def save_with_hooks(
    hooks: SaveHooks,
    sharded_state_dict: ShardedStateDict | ShardedStateful,
    checkpoint_dir: str | PathLike[str],
    *,
    comm: Comm | None = None,
    progress: ProgressOption | None = None,
    **options: Unpack[JobOptions],
) -> AsyncRequest | None:
    """``save``, for the rest of the library; see there for what it takes, returns and raises.

    1. Split the state dict into tensors, objects, common state and values that are not saved.
    2. Refuse what cannot be saved.
    3. Make the table of this rank's shards.
    4. Exchange the tables of all ranks.
    5. Check that the shards make up each tensor exactly once.
    6. Decide how each tensor is cut up, which is the index, and which rank writes what.
    7. Compare replicas, and look what a base holds already.
    8. Claim the folder.
    9. Write the data files and the common state.
    10. Gather on rank 0 what all ranks have written, and write the tables of checksums.
    11. Seal: note names, sizes and digests of all files.
    12. Commit: write ``metadata.json``.
    """
    require_known("save", options, JobOptions.__optional_keys__)
    comm = chosen_comm(comm)
    job = SaveJob(comm.rank, Meter("save", comm.rank, progress), hooks, options)
    job.plan(sharded_state_dict, checkpoint_dir, comm)  # 1 to 7
    try:
        job.claim(comm, durable=True)  # 8
        if options.get("async_sharded_save", False):
            return job.start_async_save(comm)
        job.write(comm)  # 9, 10
        job.commit(comm)  # 11, 12
    except BaseException as error:
        job.folder.give_up(error)
        raise
    hooks.call_after_commit(comm)
    return None
