"""Crash-safe deletion of whole checkpoints, on a disk and in an object store.

Objects are not changed in place. A copy of the checkpoint without the values of its tensors is made
on the local disk and changed there; then a new save commits what it has become. The store copies
the values by itself.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from dist_checkpointing.errors import CheckpointNotFoundError, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local_folder, location, object_store_locks as claims
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.filesystem.object_store import Location, ObjectInfo, ObjectPath
from dist_checkpointing.format.commit import (
    DATA,
    StoreAttempt,
    data_folder,
    end_commit,
    is_committed,
    read_config,
    tolerant,
)
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    attempt_of,
    clear,
    is_spent,
    leftovers,
)
from dist_checkpointing.format.seal import SEAL_NAME, read_seal
from dist_checkpointing.threads import in_threads

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


_BACKENDS: Final = ("tensorstore", "zarr")
"""Their removals read nothing of the files that hold values."""
_THREADS: Final = 16
_UNTOUCHED: Final = (0, 0)
"""Times of use and change of a file that no step of a removal has written: so long ago that a
change shows, however coarse the clock of the file system is."""


@contextmanager
def without_values(folder: Location) -> Iterator[Path]:
    """The folder of a checkpoint on a disk, whose tensors may have lost their values.

    On a disk it is that folder itself; of one in a store a copy, in which the files of values are
    holes of the same size. UnsupportedFormatError if it is not known which files hold values.
    """
    if isinstance(folder, Path):
        yield folder
        return
    seal = read_seal(folder)
    if seal is None or read_config(folder).sharded_backend not in _BACKENDS:
        finding = Finding(
            "nothing can be removed from a checkpoint of this format in an object store",
            expected=f"a sealed one of {' or '.join(_BACKENDS)}",
            path=str(folder),
            remedy="Convert it into a new one without them: dckpt convert --exclude PATTERN.",
        )
        raise UnsupportedFormatError("tensors cannot be removed from this checkpoint", [finding])
    holes = {file.name: file.num_bytes for file in seal.files.values() if file.digest is None}
    whole = {*seal.files, SEAL_NAME, CONFIG_FNAME, ATTEMPT_NAME} - {*holes}
    with tempfile.TemporaryDirectory(prefix="dckpt-") as place:
        root = Path(place)
        for parent in {(root / name).parent for name in (*holes, *whole)}:
            parent.mkdir(parents=True, exist_ok=True)
        for name, num_bytes in holes.items():
            (root / name).touch()
            os.truncate(root / name, num_bytes)

        def get(name: str) -> None:
            place = folder / name
            (root / name).write_bytes(place.store.get(place.key))

        in_threads(get, sorted(whole), _THREADS)
        yield root


@contextmanager
def changed(checkpoint: ObjectPath) -> Iterator[Path]:
    """Let the body change a copy of a checkpoint ``without_values``, and commit what it becomes.

    The checkpoint stays as it is until then, also if the body or the store fails.
    CheckpointExistsError if a save, or another change, is going on there.
    """
    attempt = StoreAttempt.begin(checkpoint, (), overwrite=True)
    try:
        config, source = read_config(checkpoint), data_folder(checkpoint)
        assert isinstance(source, ObjectPath)
        with without_values(source) as root:
            for name in location.use_below(root):
                os.utime(root / name, ns=_UNTOUCHED)
            yield root
            seal = read_seal(root)
            if seal is not None:
                # A copy of an object has an ETag of its own.
                files = {name: replace(file, etag=None) for name, file in seal.files.items()}
                (root / SEAL_NAME).write_bytes(replace(seal, files=files).to_json())

            def put(name: str) -> None:
                target = attempt.folder / name
                if (root / name).lstat().st_mtime_ns == _UNTOUCHED[1]:
                    target.store.copy((source / name).key, target.key)
                else:
                    target.store.put(target.key, (root / name).read_bytes())

            in_threads(put, sorted(location.use_below(root)), _THREADS)
        attempt.commit(config)
    except Exception:
        attempt.abandon()
        raise
    except BaseException:
        attempt.release()
        raise
