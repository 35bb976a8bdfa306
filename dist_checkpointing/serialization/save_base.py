"""The base of a save, whose files the new checkpoint may share: what can have one, and which."""

from __future__ import annotations

import logging
from functools import partial
from os import PathLike
from pathlib import Path

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem.paths import local_folder
from dist_checkpointing.format.commit import read_config
from dist_checkpointing.storage.options import Checksum
from dist_checkpointing.storage.protocol import StorageWriter
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.planned import PlannedSaveStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import Selection, select_strategy

logger: logging.Logger = logging.getLogger(__name__)


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


def take_base(
    base: str | PathLike[str],
    folder: Path,
    strategy: SaveShardedStrategy,
    writer: StorageWriter,
    comm: Comm,
) -> None:
    """Let a writer share files of a base, if its format is that of the save. Collective.

    Raises:
        CheckpointNotFoundError: if the base is no checkpoint.
        CheckpointingException: if it is the folder that is written.
    """
    path = local_folder(base).absolute()
    work = partial(_is_usable, path, folder, (strategy.backend, strategy.version))
    writer.base = path if comm.from_rank0("looking at the base", work) else None


def _is_usable(base: Path, folder: Path, saved: tuple[str, int]) -> bool:
    """Whether the format of a base is that of the save; if not, the log says so."""
    if base.resolve() == folder.resolve():
        finding = Finding(
            "the base is the folder of the save itself",
            path=str(folder),
            remedy="Save into another folder.",
        )
        raise CheckpointingException("a checkpoint cannot be its own base", [finding])
    found = read_config(base)
    stored = (found.sharded_backend, found.sharded_backend_version)
    if stored != saved:
        logger.warning("nothing is shared with %s: it is of format %s, not %s", base, stored, saved)
    return stored == saved
