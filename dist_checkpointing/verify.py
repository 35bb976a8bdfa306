"""Whether a checkpoint can be loaded, found out by reading all of it."""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path

from dist_checkpointing.checksums import read_checksums
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import CorruptCheckpointError, Finding, UnsupportedFormatError
from dist_checkpointing.index import Index
from dist_checkpointing.loading import load, open_checkpoint
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.progress import Meter
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.strategies.selection import handles_objects
from dist_checkpointing.strategies.verification import verify_parts


def verify_checkpoint(
    checkpoint_dir: str | PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    trusted: bool = False,
) -> None:
    """Read a checkpoint and compare its checksums. Not collective.

    Where no checksums were kept, only what describes the checkpoint, common state and objects are
    read.

    Args:
        checkpoint_dir: a committed checkpoint.
        rank: which part of the work this is.
        world_size: of how many.
        trusted: unpickle anything, see ``load``.

    Raises:
        CheckpointNotFoundError: if nothing is committed there.
        CorruptCheckpointError: with everything that is damaged.
        CheckpointingException: for what cannot be read here, see ``load``.
    """
    folder = Path(checkpoint_dir)
    found = open_checkpoint(folder)
    if rank == 0:
        objects = found.sharded if handles_objects(found.sharded) else found.common
        stored = objects.load_sharded_metadata(folder)
        wanted = {key: leaf for key, leaf in stored.items() if isinstance(leaf, ShardedObject)}
        load(wanted, folder, comm=SingleProcess(), trusted=trusted)
    if not isinstance(found.sharded, PlannedLoadStrategy):
        return
    index = found.sharded.make_reader(folder).read_metadata()
    keys = sorted(index)[rank::world_size]
    tensors = found.sharded.load_tensors_metadata(folder)
    _require_checksums(folder, index, keys)
    meter = Meter("verify", rank, None)
    try:
        verify_parts([tensors[key] for key in keys], found.sharded, folder, index, meter)
    except UnsupportedFormatError:
        if read_checksums(folder):
            raise


def _require_checksums(folder: Path, index: Index, keys: list[str]) -> None:
    """A lost file of checksums must not make what it speaks of pass."""
    parts = read_checksums(folder)
    if not parts:
        return
    covered = dict.fromkeys(keys, 0)
    for part in parts:
        if part.key in covered:
            start, stop = part.flat_range or (0, part.box.num_elements)
            covered[part.key] += stop - start
    findings = [
        Finding(
            "there are no checksums for all of it",
            key,
            expected=f"{math.prod(index[key].global_shape)} elements",
            found=covered[key],
        )
        for key in keys
        if covered[key] != math.prod(index[key].global_shape)
    ]
    if findings:
        raise CorruptCheckpointError("checksums are missing", findings)
