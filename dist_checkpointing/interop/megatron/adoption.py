"""A folder that Megatron saved into is made one that this library may overwrite."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.format.commit import check_is_distributed_checkpoint, read_config
from dist_checkpointing.format.leftovers import attempt_of, leftovers, note_attempt

_DATA = re.compile(r".*__\d+_\d+\.distcp")
_FILES = re.compile(r"metadata\.json|common\.pt|\.metadata(\.tmp|\.bck)?")
_PARTS = re.compile(r"\.zarray|shard_.*\.pt")
"""What lies in the folder of a tensor of zarr, of its locks, or of a sharded object."""


def adopt(folder: Path) -> None:
    """Note what Megatron has left in a folder as what a save into it may replace.

    That is a checkpoint, or the data files and what belongs to them of a save that did not come to
    its end. Nothing is deleted: a checkpoint that is there stays one.

    Raises:
        CheckpointExistsError: if a save is writing there.
    """
    if not local_folder.is_folder(folder):
        return
    with FolderLock.acquire(folder):
        known, theirs = leftovers(folder), _made_by_megatron(folder)
        if theirs - known:
            attempt, names = attempt_of(folder) or uuid.uuid4().hex, sorted(theirs | known)
            note_attempt(folder, attempt, names, local_folder.Durability.FSYNC)


def _made_by_megatron(folder: Path) -> set[str]:
    is_whole = check_is_distributed_checkpoint(folder)
    paths = [path for path in folder.iterdir() if not path.is_symlink()]
    data = {path.name for path in paths if _DATA.fullmatch(path.name)}
    if not is_whole and not data:
        return set()
    found = data | {path.name for path in paths if _FILES.fullmatch(path.name)}
    if is_whole and read_config(folder).sharded_backend == "zarr":
        # Each array in such a checkpoint is a tensor of it; elsewhere one may be anybody's.
        folders = (path for path in paths if path.is_dir())
        found |= {p.name for p in folders if any(_PARTS.fullmatch(q.name) for q in p.iterdir())}
    return found
