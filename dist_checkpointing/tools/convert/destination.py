"""Where a conversion writes: never over what is there, and whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dist_checkpointing.errors import CheckpointExistsError, CheckpointingException, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import OWN_FOLDER
from dist_checkpointing.filesystem.locks import LOCK_NAME, FolderLock
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.object_store_locks import CLAIMS
from dist_checkpointing.format.commit import DATA, check_is_distributed_checkpoint
from dist_checkpointing.format.leftovers import attempt_of, leftovers
from dist_checkpointing.format.removal import remove_checkpoint


def check_apart(sources: Iterable[Location], destination: Location) -> None:
    """Refuse to write into what is read.

    Raises:
        CheckpointExistsError: if one is, or is inside, the other.
    """
    for source in sources:
        if location.overlap(source, destination):
            finding = Finding(
                "source and destination overlap",
                path=str(destination),
                remedy="Convert into another place.",
            )
            raise CheckpointExistsError("cannot convert a checkpoint into itself", [finding])


def check_checkpoint_place(folder: Location, *, overwrite: bool) -> None:
    """Refuse a place for a checkpoint that is taken; a conversion that did not end may lie there.

    Raises:
        CheckpointExistsError: if something else is there.
    """
    if not location.is_there(folder):
        return
    if not location.is_folder(folder):
        raise _exists(folder, "a file is here", "Name another place.")
    if check_is_distributed_checkpoint(folder):
        if not overwrite:
            raise _exists(folder, "a checkpoint is here", "Name another place, or pass --force.")
        return
    ours = {Path(name).parts[0] for name in leftovers(folder)} | {OWN_FOLDER, LOCK_NAME}
    if location.is_there(folder / CLAIMS):
        ours.add(DATA)
    others = sorted({*location.names_in(folder)} - ours)
    if others:
        raise _exists(folder, f"the folder holds {others[0]!r}", "Name an empty or a new folder.")


@contextmanager
def cleared_on_failure(folder: Location) -> Iterator[None]:
    """Leave nothing of a checkpoint that the body began to write and did not commit."""
    before = attempt_of(folder)
    try:
        yield
    except BaseException:
        began = attempt_of(folder) != before
        if began and not check_is_distributed_checkpoint(folder):
            remove_checkpoint(folder)
        raise


@contextmanager
def written_beside(
    destination: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]
) -> Iterator[Path]:
    """A path to write a file or folder at, which becomes ``destination`` if the body succeeds.

    It lies in a hidden folder beside it. A conversion that was killed leaves that; the next one
    begins by deleting it.

    Args:
        destination: a file or folder.
        overwrite: replace what is there, if it is ``replaceable``.
        replaceable: whether what is there is of the kind that is written.

    Raises:
        CheckpointExistsError: if the destination is taken, or another conversion writes there.
    """
    _check_free(destination, overwrite=overwrite, replaceable=replaceable)
    destination.parent.mkdir(parents=True, exist_ok=True)
    hidden = destination.with_name(f".{destination.name}.dckpt-partial")
    hidden.mkdir(exist_ok=True)
    try:
        lock = FolderLock.acquire(hidden)
    except CheckpointExistsError as error:
        findings = [replace(f, problem="another conversion writes here") for f in error.findings]
        raise CheckpointExistsError(f"{destination} already exists", findings) from None
    with lock:
        for entry in hidden.iterdir():
            if entry.name != LOCK_NAME:
                local_folder.remove(entry, hidden)
        try:
            yield hidden / "new"
            _check_free(destination, overwrite=overwrite, replaceable=replaceable)
            _put(hidden / "new", destination, hidden / "old")
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _put(new: Path, destination: Path, old: Path) -> None:
    if new.is_dir():
        local_folder.fsync_tree(new)
        if destination.is_dir():
            destination.rename(old)
    else:
        local_folder.fsync_file(new)
    new.replace(destination)
    local_folder.fsync_folder(destination.parent)


def _check_free(destination: Path, *, overwrite: bool, replaceable: Callable[[Path], bool]) -> None:
    if not os.path.lexists(destination):
        return
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if not overwrite:
        raise _exists(destination, "something is here", "Name another place, or pass --force.")
    if not replaceable(destination):
        raise _exists(
            destination,
            "holds something else than what would be written",
            "Delete it by hand, or name another place.",
        )


def _exists(path: Location, problem: str, remedy: str) -> CheckpointingException:
    finding = Finding(problem, path=str(path), remedy=remedy)
    return CheckpointExistsError(f"{path} already exists", [finding])
