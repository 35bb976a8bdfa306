"""Crash-safe deletion of whole checkpoints, on a disk and in an object store."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable

from dist_checkpointing.errors import CheckpointNotFoundError, Finding
from dist_checkpointing.filesystem import local_folder, location, object_store_locks as claims
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.filesystem.object_store import Location, ObjectInfo, ObjectPath
from dist_checkpointing.format.commit import DATA, end_commit, is_committed, tolerant
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    attempt_of,
    clear,
    is_spent,
    leftovers,
)

logger: logging.Logger = logging.getLogger(__name__)


def remove_checkpoint(folder: Location, attempt: str | None = None) -> None:
    """Delete what the last save into a folder created, and the folder if that leaves it empty.

    The commit goes first: a crash in between leaves an uncommitted save. CheckpointExistsError if a
    save is writing there; CheckpointNotFoundError if no save of this library noted what it created,
    or if another one than ``attempt`` is the checkpoint.
    """
    if isinstance(folder, ObjectPath):
        remove_from_store(folder, attempt=attempt)
        return
    if attempt is not None and attempt_of(folder) != attempt:
        raise _not_ours(folder, "another save is the checkpoint")
    with FolderLock.acquire(folder):
        names = leftovers(folder)
        if attempt_of(folder) is None and not is_spent(folder):
            raise _not_ours(folder, "nothing says what is ours")
        end_commit(folder)
        clear(folder, names)
        local_folder.remove(folder / ATTEMPT_NAME, folder)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or is_spent(folder):
            raise
        logger.warning("%s is not empty: it holds files that no save of ours made", folder)


def _not_ours(folder: Location, problem: str) -> CheckpointNotFoundError:
    finding = Finding(problem, path=str(folder))
    return CheckpointNotFoundError(f"{folder} is not deleted", [finding])


def remove_from_store(
    root: ObjectPath, period: float = claims.PERIOD, *, attempt: str | None = None
) -> None:
    """Delete a checkpoint, and what unfinished saves left below its prefix.

    ``metadata.json`` goes first, then the commit, then the data: a crash in between leaves either
    the whole, which the next save makes a checkpoint again, or an uncommitted save. Errors are
    those of ``remove_checkpoint``; if the store does not answer, what is left is as after a crash.
    """
    store = root.store
    # Before the claim: nothing that a later save writes is in this list.
    found = [*root.objects()]
    numbers, decided = claims.numbers_in(root, found)
    if not numbers:
        raise _not_ours(root, "no save of this library claimed this prefix")
    commits = _commits_in_order(root, numbers, decided, attempt)
    claim = claims.HeldClaim.acquire(root, period, (numbers, decided))
    try:
        if _marks_of_commits(root, claim.found) != _marks_of_commits(root, found):
            commits = _commits_in_order(root, claim.numbers, claim.decided, attempt)
            found = [*root.objects()]
            claim.require_held()
        store.delete([(root / CONFIG_FNAME).key])
        for some in commits:
            store.delete([(root / f"{claims.COMMITS}/{number}.json").key for number in some])
        below = tuple((root / name).prefix for name in (DATA, claims.BEATS))
        earlier = [
            (root / f"{claims.CLAIMS}/{n}.json").key for n in claim.numbers if n < claim.number
        ]
        store.delete([*(info.key for info in found if info.key.startswith(below)), *earlier])
        claim.forget()
        store.delete([claim.path.key])
    except Exception:
        with tolerant("a removal was not noted as ended: the next save waits for a while"):
            claim.end()
        raise
    finally:
        claim.stop()


def _marks_of_commits(root: ObjectPath, found: Iterable[ObjectInfo]) -> list[object]:
    """What changes when a claim is decided, or the numbers of claims have begun again."""
    below = (root / claims.COMMITS).prefix
    return [info if info.etag else object() for info in found if info.key.startswith(below)]


def _commits_in_order(
    root: ObjectPath, numbers: list[int], decided: list[int], attempt: str | None
) -> tuple[set[int], set[int]]:
    """The numbers of the commits that a removal deletes at first, and of the one that goes last.

    That is the checkpoint: an older commit must not come to light again. CheckpointNotFoundError if
    it is another one than ``attempt``.
    """
    outcomes = {number: claims.read_outcome(root, number) for number in decided}
    last = [number for number in decided if "attempt" in outcomes[number]][-1:]
    for number in last if attempt is not None else ():
        name = str(outcomes[number]["attempt"])
        # A copy from a disk keeps the name that the save had there.
        if attempt != name and attempt != attempt_of(root / DATA / name):
            raise _not_ours(root, "another save is the checkpoint")
    return {*decided} - {*last} - claims.fence_numbers(root, numbers, outcomes), {*last}


def is_leftover(folder: Location) -> bool:
    """Whether what is in a folder is of a save of ours that has not committed, or was removed."""
    if is_committed(folder):
        return False
    if isinstance(folder, ObjectPath):
        return bool(location.names_in(folder / claims.CLAIMS))
    return attempt_of(folder) is not None or is_spent(folder)
