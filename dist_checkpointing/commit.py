"""What turns files into a checkpoint, and what a failed save leaves behind.

``metadata.json`` is the commit: written last, and without it there is no checkpoint. Before the
first byte, ``.dckpt/attempt.json`` names what the save is about to create; a later save into the
same folder deletes exactly that, and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

import xxhash

from dist_checkpointing import store
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
)
from dist_checkpointing.folders import local_folder
from dist_checkpointing.removal import REMOVAL_NAME

logger = logging.getLogger(__name__)

CONFIG_FNAME = "metadata.json"
COMMON_STATE_FNAME = "common.pt"
DCP_METADATA_NAME = ".metadata"
"""Written last by torch DCP, which knows no ``metadata.json``."""
ATTEMPT_NAME = ".dckpt/attempt.json"
_OWN_FOLDER = ".dckpt"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_ATTEMPT_BYTES = 1 << 30
_ATTEMPT_START_BYTES = len('{"attempt":"0123456789abcdef0123456789abcdef"')


@dataclass(frozen=True, slots=True)
class CheckpointingConfig:
    """The content of ``metadata.json``: which strategies read this checkpoint.

    Megatron readers refuse a fifth field, so there will never be one.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


_PLAIN_DCP = CheckpointingConfig("torch_dist", 1, "torch_dist", 1)


def _is_plain_dcp(folder: Path) -> bool:
    """Whether torch DCP alone saved into the folder, and came to an end.

    A save of ours or Megatron's that did not is none: they commit by a later file.
    """
    others = (CONFIG_FNAME, COMMON_STATE_FNAME, _OWN_FOLDER)
    return (folder / DCP_METADATA_NAME).is_file() and not any(
        (folder / name).exists() for name in others
    )


def _is_committed(folder: Path) -> bool:
    return (folder / CONFIG_FNAME).exists() or _is_plain_dcp(folder)


def read_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig:
    """The config of a committed checkpoint, also of a plain one of torch DCP, which has no file.

    Raises:
        CheckpointNotFoundError: if the folder is missing or nothing was committed in it.
        CorruptCheckpointError: if ``metadata.json`` is not what it should be.
        UnsupportedFormatError: if the path is a URL.
    """
    folder = local_folder(checkpoint_dir)
    path = folder / CONFIG_FNAME
    if not folder.is_dir():
        problem = "it is a file, not a folder" if folder.exists() else "no such folder"
        finding = Finding(problem, path=str(folder))
        raise CheckpointNotFoundError(f"Checkpoint directory {folder} does not exist", [finding])
    if _is_plain_dcp(folder):
        return _PLAIN_DCP
    if not path.is_file():
        half = (folder / ATTEMPT_NAME).exists()
        finding = Finding(
            "a save was begun here and never committed" if half else f"{CONFIG_FNAME} is missing",
            path=str(path),
            remedy="Load an older checkpoint." if half else "Is this the right folder?",
        )
        raise CheckpointNotFoundError(f"{folder} is not a distributed checkpoint", [finding])
    try:
        content = store.parse_json(store.read_bytes(path, _MAX_CONFIG_BYTES))
        known = {f.name for f in fields(CheckpointingConfig)}
        config = CheckpointingConfig(**{k: v for k, v in content.items() if k in known})
        for field in fields(config):
            kind = str if field.name.endswith("backend") else int
            if type(getattr(config, field.name)) is not kind:
                raise ValueError(f"{field.name} is not of type {kind.__name__}")
        # Megatron >= 0.19 names no common backend and keeps the common state with the tensors.
        is_inside = "common_backend" not in content and not (folder / COMMON_STATE_FNAME).exists()
        if config.sharded_backend == "torch_dist" and is_inside:
            config = replace(config, common_backend="torch_dist")
    except (ValueError, TypeError, AttributeError) as error:
        finding = Finding(str(error), path=str(path), remedy="Restore the file.")
        raise CorruptCheckpointError(f"{CONFIG_FNAME} cannot be read", [finding]) from error
    return config


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether a committed checkpoint is there; an unreadable one is not (and is logged)."""
    try:
        read_config(checkpoint_dir)
    except CheckpointNotFoundError:
        return False
    except CorruptCheckpointError as error:
        logger.warning("%s", error)
        return False
    return True


def number_of_save(checkpoint_dir: str | os.PathLike[str]) -> int:
    """A number that tells the saves into one folder apart; 0 if this library made none there."""
    path = Path(checkpoint_dir) / ATTEMPT_NAME
    if not path.exists():
        return 0
    with path.open("rb") as file:
        start = file.read(_ATTEMPT_START_BYTES)
    return xxhash.xxh3_64_intdigest(start) >> 2


def is_in_attempt(folder: Path, attempt: str) -> bool:
    """Whether the last save that began in a folder is this one."""
    path = folder / ATTEMPT_NAME
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(_ATTEMPT_START_BYTES) == f'{{"attempt":"{attempt}"'.encode()


class Attempt:
    """One try to write a checkpoint; only rank 0 has one.

    The file lock on ``attempt.json`` is what tells a live save from a leftover: it goes with the
    process, however that ends.
    """

    def __init__(
        self, folder: Path, file: IO[bytes], creates: tuple[str, ...], durability: store.Durability
    ) -> None:
        self.id = uuid.uuid4().hex
        self._folder = folder
        self._file = file
        self._creates = creates
        self._durability = durability
        # A save may be interrupted, or a request for one dropped: the lock goes with the attempt.
        self._close = weakref.finalize(self, _let_go, file, os.getpid())

    @classmethod
    def begin(
        cls,
        checkpoint_dir: str | os.PathLike[str],
        creates: Iterable[str],
        *,
        overwrite: bool = False,
        durability: store.Durability = store.Durability.FSYNC,
    ) -> Attempt:
        """Claim the folder and clear away what an uncommitted attempt left in it.

        Nothing may be written before ``secure``, which waits for the disk.

        Args:
            checkpoint_dir: made if missing.
            creates: relative names of all files and folders that the save will make.
            overwrite: give up a committed checkpoint that is in the way, from here on.
            durability: of the attempt's own files.

        Raises:
            CheckpointExistsError: if the folder holds a committed checkpoint (without
                ``overwrite``), a live save, or files of these names that no attempt made. Nothing
                was touched then.
        """
        folder = local_folder(checkpoint_dir)
        names = tuple(dict.fromkeys([*creates, CONFIG_FNAME]))
        if _is_committed(folder) and not overwrite:
            finding = Finding(
                "a committed checkpoint is here",
                path=str(folder),
                remedy="Save into another folder, or pass overwrite=True to give this one up.",
            )
            raise CheckpointExistsError(f"{folder} already holds a checkpoint", [finding])
        if _is_committed(folder) and not (folder / ATTEMPT_NAME).exists():
            finding = Finding(
                "this checkpoint was written by another program, which did not note its files",
                path=str(folder),
                remedy="Delete it by hand, or save into another folder.",
            )
            raise CheckpointExistsError(f"{folder} cannot be overwritten", [finding])
        (folder / ATTEMPT_NAME).parent.mkdir(parents=True, exist_ok=True)
        file = (folder / ATTEMPT_NAME).open("a+b")
        try:
            _lock(file, folder)
            leftovers = _named_in(file)
            _refuse_foreign(folder, names, leftovers)
            attempt = cls(folder, file, names, durability)
            # The old checkpoint ends here, before anything of it is damaged.
            if (folder / CONFIG_FNAME).exists():
                (folder / CONFIG_FNAME).unlink()
                store.fsync_folder(folder)
            for path in store.temporaries(leftovers, folder):
                store.remove(path, folder)
            for name in leftovers:
                store.remove(folder / name, folder)
            # It spoke of the old checkpoint.
            (folder / REMOVAL_NAME).unlink(missing_ok=True)
            attempt._record()
        except BaseException:
            _let_go(file, os.getpid())
            raise
        return attempt

    @property
    def creates(self) -> tuple[str, ...]:
        """Relative names of the files and folders that the save makes."""
        return self._creates

    def _record(self) -> None:
        content = {"attempt": self.id, "creates": self._creates}
        self._file.truncate(0)
        self._file.write(json.dumps(content, separators=(",", ":")).encode())
        self._file.flush()

    def secure(self) -> None:
        """Make the record of what is about to be created durable, before anything is."""
        if self._durability is store.Durability.FSYNC:
            os.fsync(self._file.fileno())
            store.fsync_folder(self._folder / ".dckpt")
            store.fsync_folder(self._folder)

    def commit(self, config: CheckpointingConfig) -> None:
        """Make the folder a checkpoint. Everything else must be durable by now."""
        content = json.dumps(asdict(config)).encode()
        store.write_atomic(self._folder / CONFIG_FNAME, content, self._durability)
        self._close()

    def abandon(self) -> None:
        """Free what was written. What cannot be deleted now, the next attempt deletes."""
        if not self._close.alive:
            return  # committed, or let go: what is here is no longer this attempt's to judge
        left = []
        # The commit goes first, should it have come that far.
        for name in reversed(self._creates):
            try:
                store.remove(self._folder / name, self._folder)
            except OSError as error:
                logger.warning("could not remove %s of a failed save: %s", name, error)
                left.append(name)
        # What is gone is no longer ours: the next file of that name may be somebody else's.
        self._creates = tuple(left)
        try:
            self._record()
            self.secure()
        except OSError as error:
            logger.warning("could not note what a failed save left: %s", error)
        self._close()

    def release(self) -> None:
        """Let go of the folder as it is; the next attempt clears away what is there."""
        self._close()


def check_distinct(names: Sequence[str]) -> None:
    """Refuse to let two keys of a save have the same file.

    Raises:
        InvalidShardingError: naming the files.
    """
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        findings = [Finding("two keys want the same file", path=name) for name in twice]
        raise InvalidShardingError("keys of the state dict clash", findings)


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        finding = Finding(
            "another save is writing here", path=str(folder), remedy="Wait for it to end."
        )
        raise CheckpointExistsError(f"{folder} is being written", [finding]) from None


def _let_go(file: IO[bytes], owner: int) -> None:
    """Unlock, and not only close: a process forked meanwhile has the lock too, and would keep it.

    What such a process closes is none of its own.
    """
    if os.getpid() == owner and not file.closed:
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def _named_in(file: IO[bytes]) -> set[str]:
    """What the attempt recorded in the file was about to create; none if it never got so far."""
    file.seek(0)
    data = file.read(min(os.fstat(file.fileno()).st_size, _MAX_ATTEMPT_BYTES))
    if not data:
        return set()
    try:
        names = store.parse_json(data)["creates"]
        safe = all(_is_inside(name) for name in names)
    except (ValueError, KeyError, TypeError):
        # Cut off while it was written: the attempt had not created anything yet.
        return set()
    if not safe:
        finding = Finding("names a path outside the checkpoint", path=file.name)
        raise CorruptCheckpointError("a leftover attempt cannot be cleared away", [finding])
    return set(names)


def leftovers(folder: Path) -> set[str]:
    """What the last save into a folder, committed or not, was about to create in it."""
    path = folder / ATTEMPT_NAME
    if not path.exists():
        return set()
    with path.open("rb") as file:
        return _named_in(file)


def attempt_of(folder: Path) -> str | None:
    """Name of the last save into a folder; None if this library made none there."""
    path = folder / ATTEMPT_NAME
    if not path.exists():
        return None
    try:
        content = store.parse_json(store.read_bytes(path, _MAX_ATTEMPT_BYTES))
        name = content["attempt"]
    except (ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def remove_checkpoint(folder: Path) -> None:
    """Delete what the last save into a folder created, and the folder if that leaves it empty.

    The commit goes first: a crash in between leaves an uncommitted save.

    Raises:
        CheckpointExistsError: if a save is writing there.
    """
    with (folder / ATTEMPT_NAME).open("rb") as file:
        _lock(file, folder)
        names = _named_in(file)
        if (folder / CONFIG_FNAME).exists():
            (folder / CONFIG_FNAME).unlink()
            store.fsync_folder(folder)
        for path in store.temporaries(names, folder):
            store.remove(path, folder)
        for name in sorted({*names, REMOVAL_NAME}):
            store.remove(folder / name, folder)
        store.remove(folder / ATTEMPT_NAME, folder)
    if any(folder.iterdir()):
        logger.warning("%s is not empty: it holds files that no save of ours made", folder)
    else:
        folder.rmdir()


def _is_inside(name: str) -> bool:
    """Whether a name is that of something in the checkpoint, and not of all of it."""
    path = Path(name)
    whole = not path.parts or path.as_posix() in (".dckpt", ATTEMPT_NAME)
    return not whole and not path.is_absolute() and ".." not in path.parts


def _refuse_foreign(folder: Path, names: Iterable[str], leftovers: set[str]) -> None:
    foreign = [n for n in names if n not in leftovers and os.path.lexists(folder / n)]
    if CONFIG_FNAME in foreign:
        foreign.remove(CONFIG_FNAME)
    if foreign:
        findings = [
            Finding(
                "exists, and no unfinished save of ours made it",
                path=str(folder / name),
                remedy="Save into an empty folder.",
            )
            for name in foreign
        ]
        raise CheckpointExistsError(f"{folder} is not empty", findings)
