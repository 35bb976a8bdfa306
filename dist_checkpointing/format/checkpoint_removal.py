"""The end of a whole checkpoint, on a disk or in a store, and what is left of saves without one."""

from __future__ import annotations

import errno
import logging

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.filesystem.object_store_locks import CLAIMS
from dist_checkpointing.format.commit import end_commit, is_committed
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    attempt_of,
    clear,
    is_spent,
    leftovers,
)
from dist_checkpointing.format.store_commit import remove_from_store

logger: logging.Logger = logging.getLogger(__name__)


def remove_checkpoint(folder: Location) -> None:
    """Delete what the last save into a folder created, and the folder if that leaves it empty.

    The commit goes first: a crash in between leaves an uncommitted save.

    Raises:
        CheckpointExistsError: if a save is writing there.
        CheckpointingException: if no save of this library noted what it created there.
        OSError: if the file system fails; what is left is an uncommitted save.
    """
    if isinstance(folder, ObjectPath):
        remove_from_store(folder)
        return
    with FolderLock.acquire(folder):
        names = leftovers(folder)
        if attempt_of(folder) is None and not is_spent(folder):
            finding = Finding("nothing says what is ours", path=str(folder / ATTEMPT_NAME))
            raise CheckpointingException(f"{folder} is not deleted", [finding])
        end_commit(folder)
        clear(folder, names)
        local_folder.remove(folder / ATTEMPT_NAME, folder)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or is_spent(folder):
            raise
        logger.warning("%s is not empty: it holds files that no save of ours made", folder)


def is_leftover(folder: Location) -> bool:
    """Whether what is in a folder is of a save of ours that has not committed, or was removed.

    Raises:
        OSError: if that cannot be found out.
    """
    if is_committed(folder):
        return False
    if isinstance(folder, ObjectPath):
        return bool(location.names_in(folder / CLAIMS))
    return attempt_of(folder) is not None or is_spent(folder)
