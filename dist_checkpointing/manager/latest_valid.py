"""What tells whether a step can be loaded: checks that the ranks share, and one verdict."""

from __future__ import annotations

from collections.abc import Callable

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.checkpoint.verify_checkpoint import Notes
from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.rank_failures import Failure, merge_failures
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    InvalidShardingError,
    RankFailedError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import is_seen
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import checksum_files, read_table
from dist_checkpointing.format.commit import data_folder, is_committed, read_config
from dist_checkpointing.format.seal import read_seal
from dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedStateful
from dist_checkpointing.mapping.objects_and_factories import as_state_dict
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.coverage import find_coverage_problems
from dist_checkpointing.planning.shard_table import ShardTable, describe
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.strategies.base import LoadShardedStrategy
from dist_checkpointing.strategies.selection import Selection, open_checkpoint


def judge(comm: Comm, step: int, work: Callable[[], None]) -> None:
    """Raise the errors that ranks find in a checkpoint; if some find damage, only that.

    Collective. Any other exception on a rank becomes a RankFailedError.
    """
    what = f"verifying step {step}"

    def found() -> CheckpointingException | None:
        try:
            work()
        except CheckpointingException as error:
            if isinstance(error, RankFailedError):
                raise
            return error
        return None

    errors = {r: error for r, error in enumerate(comm.exchange(what, found)) if error is not None}
    damage = {r: error for r, error in errors.items() if isinstance(error, CorruptCheckpointError)}
    if errors:
        failures = {rank: Failure.of(error) for rank, error in (damage or errors).items()}
        raise merge_failures(what, failures, comm.world_size)


def check_sealed_files(folder: Location, rank: int, world_size: int) -> None:
    """Compare the sizes of all files and the contents of small ones with the seal. Not collective.

    Damaged metadata may look like that of other tensors. So it is compared before a load can blame
    the template. Each of ``world_size`` ranks does its part. Rank 0 has seen the checkpoint.
    """
    if rank:
        is_seen(lambda: is_committed(folder))
    read_config(folder)
    folder = data_folder(folder)
    notes = Notes()
    notes.look_at_files(folder, read_seal(folder), rank, world_size)
    if notes.findings:
        raise CorruptCheckpointError("stored data is not what was saved", notes.findings)
    open_checkpoint(folder)


def is_verifiable(folder: Location, strategy: Selection[LoadShardedStrategy]) -> bool:
    """Whether ``load`` can verify the tensors of a checkpoint while it reads them."""
    if strategy is not None:
        try:
            open_checkpoint(data_folder(folder), strategy)
        except UnsupportedFormatError:
            return True  # the load itself raises that
    return any(read_table(path).parts() for path in checksum_files(data_folder(folder)))


def asks_for_all(
    template: ShardedStateDict | ShardedStateful, folder: Location, comm: Comm
) -> bool:
    """Whether the ranks together ask for everything that a checkpoint holds. Collective.

    Only rank 0 gets the answer; it is False on the other ranks.
    """
    asked_for = as_state_dict(template, comm)

    def describe_template() -> tuple[dict[str, ShardTable], None]:
        parts = StateDictParts.of(asked_for)
        leaves: list[ShardedBase] = [*parts.tensors.values(), *parts.objects.values()]
        return {"tensors": describe(leaves, comm.rank)}, None

    try:
        exchanged = exchange_tables(comm, "describing the template", describe_template)
    except InvalidShardingError:
        # It can be loaded and not saved: nobody knows what all of it would be.
        return False
    with comm.agreed("comparing the template with all of the checkpoint"):
        if comm.rank != 0:
            return False
        catalog = exchanged.catalog("tensors")
        asked = dict(zip(catalog.key_column, catalog.global_shape_column, strict=True))
        checkpoint = Checkpoint.open(folder)
        stored = {key: checkpoint.index[key].global_shape for key in checkpoint.index}
        stored |= {key: handle.shape for key, handle in checkpoint.objects.items()}
        is_there = all(asked.get(key) == shape for key, shape in stored.items())
        return is_there and not find_coverage_problems(catalog)
