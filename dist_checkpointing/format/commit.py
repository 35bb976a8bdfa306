"""Claiming a place for a save, the commit, and where committed data lies.

In a folder ``metadata.json`` is the commit: written last, and without it there is no checkpoint.
Before the first byte, ``.dckpt/attempt.json`` names what the save is about to create; a later save
into the same folder deletes exactly that, and nothing else. Data is never deleted while
``metadata.json`` may be there.

In an object store everything that a save writes lies below ``data/<attempt>/``, a name that is
never used again. The commit is ``.dckpt/commits/<n>.json``; ``metadata.json`` follows it. See
docs/design/001-commit.md for each point where a save may be cut off.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
)
from dist_checkpointing.filesystem import local_folder, location, object_store_locks as claims
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER, Durability, make_dckpt_folder
from dist_checkpointing.filesystem.location import as_location, is_file, is_seen, is_there
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.format.foreign_formats import (
    COMMON_STATE_FNAME,
    MODEL_INDEX_NAME,
    foreign_backend,
    is_plain_dcp,
    model_names,
)
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    DCP_METADATA_NAME,
    attempt_json,
    attempt_of,
    clear,
    clear_temporaries,
    is_in_attempt,
    leftovers,
    note_attempt,
    refuse_foreign,
)

logger: logging.Logger = logging.getLogger(__name__)
CONTENT_METADATA_KEY = "content_metadata"
_MAX_BYTES = 1 << 20
DATA: Final = "data"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class CheckpointingConfig:
    """The content of ``metadata.json``: which strategies read this checkpoint.

    Megatron readers refuse a fifth field, so there will never be one.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> CheckpointingConfig:
        """The config of these fields; others are passed over."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})


def is_committed(folder: Location) -> bool:
    """Whether there is a commit, of whatever content: what it commits must not be touched.

    OSError if that cannot be found out, which is not the same as no.
    """
    # What is in the way of the file on a disk may be anything.
    is_here = is_file if isinstance(folder, ObjectPath) else is_there
    names = (CONFIG_FNAME, MODEL_INDEX_NAME)
    return any(is_here(folder / name) for name in names) or is_plain_dcp(folder)


def read_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig:
    """The config of a committed checkpoint, also of a plain one of torch DCP, which has no file.

    CheckpointNotFoundError if the folder is missing or nothing was committed in it;
    CorruptCheckpointError if ``metadata.json`` is not what it should be.
    """
    folder = as_location(checkpoint_dir)
    path = folder / CONFIG_FNAME
    try:
        return _parsed_config(path)
    except OSError as error:
        if error.errno not in {*local_folder.NOT_THERE, errno.EISDIR}:
            raise
        missing = error
    if (backend := foreign_backend(folder)) is not None:
        common = "torch" if backend == "database" else backend
        return CheckpointingConfig(backend, 1, common, 1)
    raise _not_found(folder) from missing


def _parsed_config(path: Location) -> CheckpointingConfig:
    with local_folder.parsing(f"{CONFIG_FNAME} cannot be read", path, remedy="Restore the file."):
        content = location.read_json(path, _MAX_BYTES)
        config = CheckpointingConfig.of(content)
        for field in fields(config):
            kind = str if field.name.endswith("backend") else int
            if type(getattr(config, field.name)) is not kind:
                raise ValueError(f"{field.name} is not of type {kind.__name__}")
        # Megatron >= 0.19 names no common backend and keeps the common state with the tensors.
        is_inside = "common_backend" not in content and not is_there(
            path.parent / COMMON_STATE_FNAME
        )
        if config.sharded_backend == "torch_dist" and is_inside:
            config = replace(config, common_backend="torch_dist")
    return config


def _not_found(folder: Location) -> CheckpointNotFoundError:
    message, path = f"{folder} is not a distributed checkpoint", folder / CONFIG_FNAME
    problem, remedy = f"{CONFIG_FNAME} is missing", "Is this the right path?"
    if not location.is_folder(folder):
        path, problem = folder, "it is neither a folder nor a file of safetensors or torch.save"
        if not is_there(folder):
            message, problem = f"Checkpoint directory {folder} does not exist", "no such folder"
            if isinstance(folder, Path) and not folder.is_absolute():
                remedy += f" The current folder is {Path.cwd()}."
    elif is_there(folder / ATTEMPT_NAME) or is_there(folder / claims.CLAIMS):
        problem, remedy = "a save was begun here and never committed", "Load an older checkpoint."
    if is_there(folder / "manager.json"):
        remedy = (
            "It is the folder of a run: CheckpointManager(path).load(template), or name a step, "
            f"such as {folder}@latest."
        )
    return CheckpointNotFoundError(message, [Finding(problem, path=str(path), remedy=remedy)])


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether a committed checkpoint is there; an unreadable one does not count, and is logged.

    Example:
        >>> from dist_checkpointing import check_is_distributed_checkpoint, save
        >>> save({"step": 100}, "ckpt")
        >>> check_is_distributed_checkpoint("ckpt"), check_is_distributed_checkpoint("other")
        (True, False)
    """
    try:
        read_config(checkpoint_dir)
    except CheckpointNotFoundError:
        return False
    except CorruptCheckpointError as error:
        logger.warning("%s", error)
        return False
    return True


@dataclass(eq=False)
class Attempt:
    """One try to write a checkpoint; only rank 0 has one.

    It holds the lock of the folder, which tells a live save from a leftover. The save ``creates``
    the files and folders of these relative names in ``folder``.
    """

    id: str
    folder: Path
    creates: tuple[str, ...]
    _lock: FolderLock
    _durability: Durability
    _may_be_committed: bool = False

    @classmethod
    def begin(
        cls,
        folder: Path,
        creates: Iterable[str],
        *,
        overwrite: bool = False,
        durability: Durability = Durability.FSYNC,
        name: str | None = None,
    ) -> Attempt:
        """Claim the folder, made if missing, and clear away what an uncommitted attempt left.

        A committed checkpoint that is in the way is given up from here on, with ``overwrite``.
        Nothing may be written before ``make_durable``, which waits for the disk. The attempt has a
        ``name`` already where it has begun on another disk.

        CheckpointExistsError if the folder holds a committed checkpoint (without ``overwrite``), a
        live save, or files of these names that no attempt made. Nothing was touched then.
        """
        names = tuple(dict.fromkeys([*creates, CONFIG_FNAME]))
        refuse_committed(folder, overwrite=overwrite)
        lock = _locked(folder, durability)
        try:
            # Another save may have ended between the first look and the lock.
            there = refuse_committed(folder, overwrite=overwrite)
            is_new = make_dckpt_folder(folder)
            if not is_new and not overwrite and not local_folder.is_local(folder):
                # Another machine may have committed a moment ago, which is not seen here yet.
                is_seen(lambda: is_committed(folder))
                there = refuse_committed(folder, overwrite=False)
            left = model_names(folder) if is_new else leftovers(folder)
            if left and is_new:  # a model is replaced with the files beside it
                left |= {*names}
            refuse_foreign(folder, names, left, there)
            attempt = cls(name or os.urandom(16).hex(), folder, names, lock, durability)
            if left or not is_new:
                # The old checkpoint ends here, before anything of it is damaged.
                end_commit(folder)
                clear(folder, left)
                make_dckpt_folder(folder)  # which goes with the last file in it
            noted = Durability.PAGE_CACHE if is_new else durability
            note_attempt(folder, attempt.id, names, noted)
        except BaseException:
            lock.release()
            raise
        return attempt

    def make_durable(self) -> None:
        """Make the record of what is about to be created durable, before anything is."""
        if self._durability is Durability.FSYNC:
            dckpt = self.folder / DCKPT_FOLDER
            local_folder.fsync_folder(self.folder / ATTEMPT_NAME, dckpt, self.folder)

    def commit(self, config: CheckpointingConfig) -> None:
        """Make the folder a checkpoint.

        Everything else must be durable by now, but for the names in the folder itself and in
        ``.dckpt``, where most of the last files are.
        """
        self._write_commit(CONFIG_FNAME, json.dumps(vars(config)).encode())
        self._lock.release()

    def commit_as_foreign(self, name: str, content: bytes | None, file: Location | None) -> None:
        """Make the folder one of another program, by its file; nothing tells then who wrote it.

        Without content that is the one file in the folder, and takes the place of ``file``.
        """
        if content is not None:
            self._write_commit(name, content)
        else:
            assert isinstance(file, Path)
            self._require_held()
            (self.folder / name).replace(file)
            local_folder.fsync_folder(file.parent)
        with tolerant(f"{self.folder / DCKPT_FOLDER} is of no use any more"):
            local_folder.remove(self.folder / DCKPT_FOLDER, self.folder)
        self._lock.release()
        if content is None:
            with tolerant(f"{self.folder} is of no use any more"):
                self.folder.rmdir()

    def _require_held(self) -> None:
        if not is_in_attempt(self.folder, self.id):
            finding = Finding("another save has taken over", path=str(self.folder / ATTEMPT_NAME))
            raise CheckpointExistsError(f"{self.folder} is not committed", [finding])

    def _write_commit(self, name: str, content: bytes) -> None:
        self._require_held()
        if self._durability is Durability.FSYNC:
            local_folder.fsync_folder(self.folder / DCKPT_FOLDER, self.folder)
        self._may_be_committed = True
        local_folder.write_atomic(self.folder / name, content, self._durability)

    def abandon(self) -> None:
        """Free what was written. What cannot be deleted now, the next attempt deletes."""
        if not self._lock.is_held:
            return  # committed, or released: what is here is no longer this attempt's to judge
        with self._lock:
            try:
                if not is_in_attempt(self.folder, self.id):
                    return  # the lock was taken away, and another save has begun here
                if self._may_be_committed or is_committed(self.folder):
                    end_commit(self.folder)
            except OSError as error:
                logger.warning(
                    "%s cannot be taken back (%s): what was saved stays, and may be a checkpoint",
                    self.folder / CONFIG_FNAME,
                    error,
                )
                return
            clear_temporaries(self.folder)
            names, left = self.creates, dict.fromkeys(self.creates)
            # What is gone is no longer ours: the next file of that name may be somebody else's. But
            # another machine may have made what is not seen here yet.
            sees_all = local_folder.is_local(self.folder)
            for name in reversed(names):
                with tolerant(f"could not remove {name} of a failed save"):
                    if local_folder.remove(self.folder / name, self.folder) or sees_all:
                        del left[name]
            self.creates = tuple(left)
            with tolerant("could not note what a failed save left"):
                if self._durability is Durability.FSYNC:
                    location.fsync_folders(names, self.folder, to_root=True)
                note_attempt(self.folder, self.id, self.creates, self._durability)
                self.make_durable()

    def release(self) -> None:
        """Leave the folder as it is; the next attempt clears away what is there."""
        self._lock.release()


def check_distinct(names: Sequence[str]) -> None:
    """Refuse to let two keys of a save have the same file."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    findings = [Finding("two keys want the same file", path=name) for name in twice]
    InvalidShardingError.raise_if(findings, "keys of the state dict clash")


def refuse_committed(folder: Location, *, overwrite: bool) -> set[str]:
    """Refuse to save over a checkpoint without ``overwrite``, or over one that is not ours.

    Returns the names of what is there.
    """
    there = {*location.names_in(folder)}
    commits = (CONFIG_FNAME, DCP_METADATA_NAME, MODEL_INDEX_NAME)
    # Of a file system, a list may be older than what is known of a name.
    is_known = isinstance(folder, ObjectPath) and there.isdisjoint(commits)
    if is_known or not is_committed(folder):
        return there
    if not overwrite:
        message = f"{folder} already holds a checkpoint"
        problem = "a committed checkpoint already exists here"
        remedy = "Save to another place, or pass overwrite=True to replace this one."
    elif not is_file(folder / MODEL_INDEX_NAME) and (
        (read_commit(folder) if isinstance(folder, ObjectPath) else attempt_of(folder)) is None
    ):
        message = f"{folder} cannot be overwritten"
        problem = (
            "it was copied to here, or another program wrote it: nothing says which files are ours"
        )
        remedy = "Delete it by hand, or save to another place."
    else:
        return there
    raise CheckpointExistsError(message, [Finding(problem, path=str(folder), remedy=remedy)])


def _locked(folder: Path, durability: Durability) -> FolderLock:
    """The lock of a folder, which is made if it is missing."""
    is_durable = durability is Durability.FSYNC
    while True:
        try:
            (local_folder.make_durable_folder if is_durable else location.make_folder)(folder)
        except (FileExistsError, NotADirectoryError) as error:
            finding = Finding("a file is in the way", path=str(error.filename))
            raise CheckpointExistsError(f"{folder} cannot be made", [finding]) from error
        try:
            return FolderLock.acquire(folder)
        except FileNotFoundError:
            continue  # another process removed a checkpoint there, and the folder with it


def end_commit(folder: Path) -> None:
    """Make sure that no commit is there, and that none comes back with a power cut.

    OSError if that is not certain: nothing that it commits may be deleted then.
    """
    for name in (CONFIG_FNAME, MODEL_INDEX_NAME):
        (folder / name).unlink(missing_ok=True)
    local_folder.fsync_folder(folder)


@dataclass(frozen=True, slots=True)
class Commit:
    """A save that has committed in an object store. Its files lie below ``data/<attempt>/``.

    Of several the one whose claim has the highest ``number`` is the checkpoint.
    """

    number: int
    attempt: str
    config: CheckpointingConfig

    @property
    def data(self) -> str:
        """Name of the folder of its files, below the place of the checkpoint."""
        return f"{DATA}/{self.attempt}"


def read_commit(folder: Location, decided: Iterable[int] | None = None) -> Commit | None:
    """The last save that has committed here; None if there is none, and on a disk.

    Readers also need ``metadata.json``: it goes first when a checkpoint is removed. ``decided`` are
    the numbers of the claims that are, if they have been listed. CorruptCheckpointError if a commit
    cannot be read.
    """
    if decided is None:
        names = (name.removesuffix(".json") for name in location.names_in(folder / claims.COMMITS))
        decided = (int(name) for name in names if name.isdecimal())
    for number in sorted(decided, reverse=True):
        path = folder / f"{claims.COMMITS}/{number}.json"
        data = location.read_regular(path, _MAX_BYTES)
        if data is None:
            continue  # removed meanwhile
        with local_folder.parsing("a commit cannot be read", path):
            outcome: Any = local_folder.parse_json(data)
            if "attempt" in outcome:  # the others have been ended before they could commit
                if not _ATTEMPT.fullmatch(outcome["attempt"]):
                    raise ValueError(f"{outcome['attempt']!r} is no name of a save")
                config = CheckpointingConfig.of(outcome["config"])
                return Commit(number, outcome["attempt"], config)
    return None


def data_folder(checkpoint_dir: str | os.PathLike[str]) -> Location:
    """The folder that is laid out like a checkpoint on a disk.

    That is ``data/<attempt>`` of the save that ``.dckpt/commits`` names. Where there are no commits
    it is the folder itself: on a disk, and for a copy of such a folder in a store. See
    ``as_location`` and ``read_commit`` for the errors.
    """
    root = as_location(checkpoint_dir)
    commit = read_commit(root)
    # A removal begins with this file, and a commit is complete with it.
    if commit is not None and is_file(root / CONFIG_FNAME):
        return root / commit.data
    return root


@dataclass(eq=False)
class StoreAttempt:
    """One try to write a checkpoint into an object store; only rank 0 has one.

    It has the life of ``commit.Attempt``. A checkpoint that it overwrites stays loadable until it
    commits.
    """

    id: str
    folder: ObjectPath
    creates: tuple[str, ...]
    _claim: claims.HeldClaim
    _replaces: Commit | None = None

    @classmethod
    def begin(
        cls,
        root: ObjectPath,
        creates: Iterable[str],
        *,
        overwrite: bool = False,
        period: float = claims.PERIOD,
        noted: bytes | None = None,
    ) -> StoreAttempt:
        """Claim a prefix, and clear away what saves without a commit left below it.

        With ``overwrite``, a committed checkpoint is replaced when this save commits. ``noted`` is
        what ``attempt.json`` says, for a copy of another save: a store may carry out a put again
        much later, so nothing is put twice with different contents.
        CheckpointExistsError if one is there (without it), or a live save; UnsupportedFormatError
        if the store ignores conditional puts.
        """
        names = tuple(dict.fromkeys([*creates, CONFIG_FNAME]))
        there = refuse_committed(root, overwrite=overwrite)
        # Before the claims are read: a save claims first, then writes.
        found = location.names_in(root / DATA) if DATA in there else []
        claim = claims.HeldClaim.acquire(root, period, None if DCKPT_FOLDER in there else ([], []))
        attempt = cls(claim.attempt, root / DATA / claim.attempt, names, claim)
        try:
            commit = _completed_commit(root, claim)
            if (commit and not overwrite) or (not commit and CONFIG_FNAME in there):
                refuse_committed(root, overwrite=overwrite)
            noted = attempt_json(attempt.id, names) if noted is None else noted
            location.write(attempt.folder / ATTEMPT_NAME, noted)
            attempt._replaces = commit
            clear_saves(root, {*found} - {commit.attempt if commit else ""})
            with tolerant("old claims were not deleted"):
                claim.prune(commit.number if commit else None)
        except Exception:
            attempt.release()
            raise
        except BaseException:
            claim.stop()
            raise
        return attempt

    def make_durable(self) -> None:
        """Do nothing: what was put is durable."""

    def commit(self, config: CheckpointingConfig) -> None:
        """Turn what was written into the checkpoint. Everything else must have been put by now.

        CheckpointExistsError if another save has taken over, because no heartbeat was seen;
        CheckpointingException if it cannot be found out whether the save has committed.
        """
        root = self._claim.folder
        self._claim.require_there()  # whether it has been ended is decided below
        outcome = {"attempt": self.id, "config": vars(config)}
        # Readers go there from the commit on, where another checkpoint has been.
        _put_config(self.folder, config)
        if claims.decide(root, self._claim.number, outcome) != outcome:
            raise self._claim.lost()
        _put_config(root, config)
        self._claim.stop()
        with tolerant("what a save has replaced was not deleted"):
            self._claim.forget()
            if self._replaces is not None:
                clear_saves(root, {self._replaces.attempt})

    def abandon(self) -> None:
        if not self._claim.is_held:
            return
        with tolerant("what a failed save wrote was not deleted"):
            if self._claim.end().get("attempt") != self.id:
                claims.delete_below(claims.brief(self.folder))
            else:
                logger.warning("%s: the failed save is a checkpoint after all", self._claim.folder)

    def release(self) -> None:
        if self._claim.is_held:
            with tolerant("a save was not noted as ended: the next one waits for a while"):
                self._claim.end()


def begin_attempt(
    folder: Location,
    creates: Iterable[str],
    durability: Durability,
    *,
    overwrite: bool,
    name: str | None = None,
    noted: bytes | None = None,
) -> Attempt | StoreAttempt:
    if isinstance(folder, ObjectPath):
        return StoreAttempt.begin(folder, creates, overwrite=overwrite, noted=noted)
    return Attempt.begin(folder, creates, overwrite=overwrite, durability=durability, name=name)


def finish_commit(folder: Location) -> None:
    """Put the ``metadata.json`` of a commit that was cut off before it; does nothing on a disk.

    Nor does it while a save or a removal is going on there.
    """
    if isinstance(folder, ObjectPath) and read_commit(folder) is not None:
        # A removal deletes ``metadata.json`` first, and the commit next: that takes a claim.
        with suppress(CheckpointExistsError):
            StoreAttempt.begin(folder, ()).release()


def _completed_commit(root: ObjectPath, claim: claims.HeldClaim) -> Commit | None:
    """The commit below a prefix; its ``metadata.json`` is put if the save was cut off before."""
    commit = read_commit(root, claim.decided)
    if commit is not None and not is_file(root / CONFIG_FNAME):
        claim.require_held()  # it may have been removed since it was read
        for folder in (root / commit.data, root):
            _put_config(folder, commit.config)
        logger.warning("%s: a save had committed here: it is a checkpoint now", root)
    return commit


def _put_config(folder: ObjectPath, config: CheckpointingConfig) -> None:
    # The folder of the data is a checkpoint by itself: for other tools, and to be downloaded.
    location.write(folder / CONFIG_FNAME, json.dumps(vars(config)).encode())


def clear_saves(root: ObjectPath, attempts: Iterable[str]) -> None:
    """Delete the data of saves that cannot commit any more, or were replaced."""
    for attempt in attempts:
        claims.delete_below(root / DATA / attempt)
        root.store.delete([(root / f"{claims.BEATS}/{attempt}").key])


@contextmanager
def tolerant(what: str) -> Iterator[None]:
    """Log errors: the work is done, or another error is raised already."""
    try:
        yield
    except (OSError, CheckpointingException) as error:
        logger.warning("%s: %s", what, error)
