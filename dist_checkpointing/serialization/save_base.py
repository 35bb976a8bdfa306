"""The base of a save, whose files the new checkpoint may share: what can have one, and which."""

from __future__ import annotations

import logging
from functools import partial
from os import PathLike
from pathlib import Path

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.location import as_local_folder, require_local
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import read_config
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import read_index
from dist_checkpointing.planning.chunking import nested_grids
from dist_checkpointing.serialization.disk_parts import Disks
from dist_checkpointing.serialization.save_steps import SaveJob
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.options import Checksum
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.planned_strategies import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import Selection, select_strategy

logger: logging.Logger = logging.getLogger(__name__)


def require_sharing_strategy(selection: Selection[SaveShardedStrategy], folder: Location) -> None:
    """Refuse a strategy whose checkpoints cannot share files, and a place where files cannot.

    Raises:
        UnsupportedFormatError: naming the strategy, or the place.
        StrategyNotFoundError: if there is no such strategy.
    """
    require_local(folder, "an incremental save")
    strategy = select_strategy(StrategyAction.SAVE_SHARDED, selection).resolved()
    writer = strategy.make_writer(Path()) if isinstance(strategy, PlannedSaveStrategy) else None
    require_sharing(strategy, writer)


def require_sharing(
    strategy: SaveShardedStrategy, writer: StorageWriter | None, disks: Disks | None = None
) -> None:
    """Refuse a base for a strategy that cannot share files with it, or that is not on one disk.

    Raises:
        UnsupportedFormatError: naming the strategy.
    """
    if disks is not None:
        finding = Finding(
            "files are shared with a base that is whole on one disk",
            path=disks.place,
            remedy="Save without a base, or to a disk that all ranks share.",
        )
        raise UnsupportedFormatError("each machine has a disk of its own", [finding])
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


def take_base(base: str | PathLike[str], job: SaveJob, comm: Comm) -> None:
    """Let the writer of a job share files of a base, if its format is that of the save. Collective.

    Where the chunks of the base make up larger ones of the job, the job is cut like the base.

    Raises:
        CheckpointNotFoundError: if the base is no checkpoint.
        UnsupportedFormatError: if the save, or the base, is in an object store.
        CheckpointingException: if it is the folder that is written.
    """
    require_local(job.folder, "an incremental save")
    if job.writer is None:
        return
    path = as_local_folder(base).absolute()
    grids = comm.from_rank0("looking at the base", partial(_grids, path, job))
    job.writer.base = None if grids is None else path
    if grids:
        job.cut_along(grids)


def _grids(base: Path, job: SaveJob) -> dict[str, Ints] | None:
    """Chunk shapes of a base to be taken over, by key; None if its format is another one."""
    if base.resolve() == Path(job.folder).resolve():
        finding = Finding(
            "the base is the folder of the save itself",
            path=str(job.folder),
            remedy="Save into another folder.",
        )
        raise CheckpointingException("a checkpoint cannot be its own base", [finding])
    found, saved = read_config(base), (job.strategy.backend, job.strategy.version)
    stored = (found.sharded_backend, found.sharded_backend_version)
    if stored != saved:
        logger.warning("nothing is shared with %s: it is of format %s, not %s", base, stored, saved)
        return None
    if job.index is None or not job.is_cut_in_row_blocks:
        return {}
    try:
        index = read_index(base)
    except (CheckpointingException, OSError) as error:
        logger.info("the chunks of %s are not known: %s", base, error)
        return {}
    return {} if index is None else nested_grids(job.index, index)
