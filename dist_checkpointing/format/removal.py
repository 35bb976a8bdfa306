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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local_folder, location, object_store_locks
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.filesystem.object_store_locks import (
    BEATS,
    CLAIMS,
    COMMITS,
    PERIOD,
    HeldClaim,
)
from dist_checkpointing.format.commit import (
    DATA,
    StoreAttempt,
    clear_saves,
    data_folder,
    end_commit,
    is_committed,
    read_commit,
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


def remove_checkpoint(folder: Location) -> None:
    """Delete what the last save into a folder created, and the folder if that leaves it empty.

    The commit goes first: a crash in between leaves an uncommitted save. CheckpointExistsError if a
    save is writing there, CheckpointingException if no save of this library noted what it created.
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


def remove_from_store(root: ObjectPath, period: float = PERIOD) -> None:
    """Delete a checkpoint, and what unfinished saves left below its prefix.

    ``metadata.json`` goes first, then the commit, then the data: a crash in between leaves either
    the whole, which the next save makes a checkpoint again, or an uncommitted save. Errors are
    those of ``remove_checkpoint``; if the store does not answer, what is left is as after a crash.
    """
    store = root.store
    if not object_store_locks.numbers_in(root)[0]:
        finding = Finding("no save of this library claimed this prefix", path=str(root))
        raise CheckpointingException(f"{root} is not deleted", [finding])
    # Before the claim: nothing that a later save writes is in these lists.
    found = store.list_folder((root / DATA).prefix)[0]
    beats = [info.key for info in store.list_below((root / BEATS).prefix)]
    claim = HeldClaim.acquire(root, period)
    try:
        commit = read_commit(root)
        claims, decided = object_store_locks.numbers_in(root)
        fences = object_store_locks.fence_numbers(root)
        claim.require_held()
        store.delete([(root / CONFIG_FNAME).key])
        last = set() if commit is None else {commit.number}
        # The last one goes last: an older commit must not come to light again.
        for some in ({*decided} - last - fences, last):
            store.delete([(root / f"{COMMITS}/{number}.json").key for number in some])
        clear_saves(root, {*found} if commit is None else {*found, commit.attempt})
        earlier = [(root / f"{CLAIMS}/{number}.json").key for number in claims[:-1]]
        store.delete([*earlier, *beats])
        claim.forget()
        store.delete([claim.path.key])
    except Exception:
        with tolerant("a removal was not noted as ended: the next save waits for a while"):
            claim.end()
        raise
    finally:
        claim.stop()


def is_leftover(folder: Location) -> bool:
    """Whether what is in a folder is of a save of ours that has not committed, or was removed."""
    if is_committed(folder):
        return False
    if isinstance(folder, ObjectPath):
        return bool(location.names_in(folder / CLAIMS))
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
