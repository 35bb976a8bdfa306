"""A folder that Megatron saved into is made one that this library may overwrite."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from dist_checkpointing.filesystem import local
from dist_checkpointing.filesystem.folder_lock import FolderLock
from dist_checkpointing.format.leftovers import attempt_of, leftovers, note_attempt

_FILES = re.compile(r"metadata\.json|common\.pt|\.metadata(\.tmp|\.bck)?|.*__\d+_\d+\.distcp")
_PARTS = re.compile(r"\.zarray|shard_.*\.pt")
"""What lies in the folder of a tensor of zarr, of its locks, or of a sharded object."""


def adopt(folder: Path) -> None:
    """Note what Megatron has left in a folder as what a save into it may replace.

    Nothing is deleted: a checkpoint that is there stays one.

    Raises:
        CheckpointExistsError: if a save is writing there.
    """
    if not local.is_folder(folder):
        return
    with FolderLock.acquire(folder):
        known = leftovers(folder)
        theirs = {path.name for path in folder.iterdir() if _is_theirs(path)}
        if theirs - known:
            note_attempt(folder, attempt_of(folder) or uuid.uuid4().hex, sorted(theirs | known))


def _is_theirs(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return _FILES.fullmatch(path.name) is not None
    return any(_PARTS.fullmatch(below.name) for below in path.iterdir())
