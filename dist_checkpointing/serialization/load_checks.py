"""Checks of a load on all ranks, and what an error of it must say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.mapping import ShardedBase
from dist_checkpointing.mapping.partition import Partition
from dist_checkpointing.mapping.tensor_columns import TensorColumns
from dist_checkpointing.planning.coverage import check_coverage, main_rows
from dist_checkpointing.planning.describe import describe
from dist_checkpointing.planning.exchange import exchange_tables


def require_one_save(is_one_save: bool, checkpoint_dir: str | PathLike[str]) -> None:
    """Refuse what was read if another save began meanwhile."""
    if is_one_save:
        return
    finding = Finding(
        "another save into this folder began after the load",
        path=str(checkpoint_dir),
        remedy="What was read may be of both: load again, and save each step into its own folder.",
    )
    message = "the checkpoint was overwritten while it was read"
    raise CorruptCheckpointError(message, [finding])


def check_access(parts: Partition, comm: Comm) -> None:
    """Check that the templates of all ranks ask for each tensor exactly once. Collective."""
    leaves: list[ShardedBase] = [*parts.tensors.values(), *parts.objects.values()]
    exchanged = exchange_tables(
        comm, "describing the template", lambda: ({"shards": describe(leaves, comm.rank)}, None)
    )
    with comm.agreed("checking the template"):
        catalog = exchanged.catalog("shards")
        check_coverage(catalog, main_rows(catalog))


@contextmanager
def noting_filled(wanted: TensorColumns) -> Iterator[None]:
    """Note on an error of the body which given tensors it may have filled."""
    try:
        yield
    except CheckpointingException as error:
        pairs = zip(wanted.keys, wanted.data, strict=True)
        given = sorted({key for key, data in pairs if data is not None})
        if given:
            error.add_note(
                f"The given tensors of {len(given)} keys may be partly filled: "
                f"{', '.join(given[:20])}{', ...' if len(given) > 20 else ''}"
            )
        raise
