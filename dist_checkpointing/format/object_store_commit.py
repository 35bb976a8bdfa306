"""What turns the objects of a save into a checkpoint of an object store.

Everything that a save writes lies below ``data/<attempt>/``, a name that is never used again. The
commit is ``.dckpt/commits/<n>.json``; ``metadata.json`` follows it and says that there is a
checkpoint. See docs/design/011-object-store-commit.md for each point where a save may be cut off.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem import object_store_locks
from dist_checkpointing.filesystem.local_folder import Durability
from dist_checkpointing.filesystem.location import is_file
from dist_checkpointing.filesystem.object_store import (
    Location,
    ObjectPath,
    put_surely,
    require_conditions,
)
from dist_checkpointing.filesystem.object_store_locks import (
    BEATS,
    CLAIMS,
    COMMITS,
    PERIOD,
    HeldClaim,
)
from dist_checkpointing.format.commit import (
    DATA,
    Attempt,
    CheckpointingConfig,
    Commit,
    read_commit,
    refuse_committed,
)
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME
from dist_checkpointing.format.seal import SEAL_NAME

logger: logging.Logger = logging.getLogger(__name__)
_SEAL_START_BYTES = len('{"checksum":"0123456789abcdef0123456789abcdef"')


class StoreAttempt:
    """One try to write a checkpoint into an object store; only rank 0 has one.

    It has the life of ``commit.Attempt``. A checkpoint that it overwrites stays loadable until it
    commits.
    """

    def __init__(self, location: ObjectPath, claim: HeldClaim, creates: tuple[str, ...]) -> None:
        self.id: str = claim.claim.attempt
        self.folder: ObjectPath = location / DATA / self.id
        self.creates = creates
        self._location = location
        self._claim = claim
        self._replaces: Commit | None = None

    @classmethod
    def begin(
        cls,
        location: ObjectPath,
        creates: Iterable[str],
        *,
        overwrite: bool = False,
        period: float = PERIOD,
    ) -> StoreAttempt:
        """Claim a prefix, and clear away what saves without a commit left below it.

        With ``overwrite``, a committed checkpoint is replaced when this save commits.

        Raises:
            CheckpointExistsError: if a checkpoint is there (without ``overwrite``), or a live save.
            UnsupportedFormatError: if the store ignores conditional puts.
            OSError: if the store does not answer.
        """
        names = tuple(dict.fromkeys([*creates, CONFIG_FNAME]))
        require_conditions(location)
        refuse_committed(location, read_commit, overwrite=overwrite)
        # Before the claims are read: a save claims first, then writes.
        found = location.store.list_folder((location / DATA).prefix)[0]
        claim = HeldClaim.acquire(location, period)
        attempt = cls(location, claim, names)
        try:
            commit = read_commit(location)
            is_complete = is_file(location / CONFIG_FNAME)
            if commit is not None and not is_complete:  # cut off after the commit
                claim.require_held()  # it may have been removed since it was read
                _publish(location, commit.attempt, commit.config)
                logger.warning("%s: a save had committed here: it is a checkpoint now", location)
            if commit is not None or is_complete:
                refuse_committed(location, lambda _: commit, overwrite=overwrite)
            note = json.dumps({"attempt": attempt.id, "creates": names}, separators=(",", ":"))
            path = attempt.folder / ATTEMPT_NAME
            path.store.put(path.key, note.encode())
            attempt._replaces = commit
            _clear(location, {*found} - {commit.attempt if commit else ""})
        except Exception:
            attempt.release()
            raise
        except BaseException:
            claim.stop()
            raise
        return attempt

    def secure(self) -> None:
        """Do nothing: what was put is durable."""

    def commit(self, config: CheckpointingConfig) -> None:
        """Turn what was written into the checkpoint. Everything else must have been put by now.

        Raises:
            CheckpointExistsError: if another save has taken over, because no heartbeat was seen.
            CheckpointingException: if it cannot be found out whether the save has committed.
            OSError: if the store does not answer.
        """
        own = self._claim.claim.number
        self._claim.require_held()
        outcome = {"attempt": self.id, "config": asdict(config), "seal": self._seal_checksum()}
        if object_store_locks.decide(self._location, own, outcome) != outcome:
            raise self._claim.lost()
        _publish(self._location, self.id, config)
        self._claim.stop()
        with _tolerant("what a save has replaced was not deleted"):
            self._claim.forget()
            if self._replaces is not None:
                _clear(self._location, {self._replaces.attempt})

    def _seal_checksum(self) -> str:
        path = self.folder / SEAL_NAME
        try:
            start = path.store.get_range(path.key, 0, _SEAL_START_BYTES)[0]
        except FileNotFoundError:
            return ""
        return bytes(start)[-33:-1].decode(errors="replace")

    def abandon(self) -> None:
        """Free what was written. What cannot be deleted now, the next save deletes."""
        if not self._claim.is_held:
            return
        with _tolerant("what a failed save wrote was not deleted"):
            if self._claim.end().get("attempt") != self.id:
                object_store_locks.delete_below(self.folder)
            else:
                logger.warning("%s: the failed save is a checkpoint after all", self._location)

    def release(self) -> None:
        """Let go of the prefix as it is; the next save clears away what has not committed."""
        if self._claim.is_held:
            with _tolerant("a save was not noted as ended: the next one waits for a while"):
                self._claim.end()


def begin_attempt(
    folder: Location,
    creates: Iterable[str],
    durability: Durability,
    *,
    overwrite: bool,
) -> Attempt | StoreAttempt:
    """Claim the place of a checkpoint; see ``Attempt.begin`` and ``StoreAttempt.begin``."""
    if isinstance(folder, ObjectPath):
        return StoreAttempt.begin(folder, creates, overwrite=overwrite)
    return Attempt.begin(folder, creates, overwrite=overwrite, durability=durability)


def finish_commit(folder: Location) -> None:
    """Put the ``metadata.json`` of a commit that was cut off before it; does nothing on a disk.

    Raises:
        CheckpointExistsError: if a save or a removal is going on there.
        OSError: if the store does not answer.
    """
    if not isinstance(folder, ObjectPath) or is_file(folder / CONFIG_FNAME):
        return
    if read_commit(folder) is None:
        return
    claim = HeldClaim.acquire(
        folder, PERIOD
    )  # a removal deletes this file first, and the commit next
    try:
        commit = read_commit(folder)
        if commit is not None and not is_file(folder / CONFIG_FNAME):
            _publish(folder, commit.attempt, commit.config)
    finally:
        with _tolerant("a look was not noted as ended: the next save waits for a while"):
            claim.end()


def remove_from_store(location: ObjectPath, period: float = PERIOD) -> None:
    """Delete a checkpoint, and what unfinished saves left below its prefix.

    ``metadata.json`` goes first, then the commit, then the data: a crash in between leaves either
    the whole, which the next save makes a checkpoint again, or an uncommitted save.

    Raises:
        CheckpointExistsError: if a save is writing there.
        CheckpointingException: if no save of this library wrote there.
        OSError: if the store does not answer; what is left is as after a crash.
    """
    store = location.store
    if not object_store_locks.numbers_in(location)[0]:
        finding = Finding("no save of this library claimed this prefix", path=str(location))
        raise CheckpointingException(f"{location} is not deleted", [finding])
    # Before the claim: nothing that a later save writes is in these lists.
    found = store.list_folder((location / DATA).prefix)[0]
    beats = [info.key for info in store.list_below((location / BEATS).prefix)]
    claim = HeldClaim.acquire(location, period)
    try:
        commit = read_commit(location)
        claims, decided = object_store_locks.numbers_in(location)
        fences = object_store_locks.fence_numbers(location)
        claim.require_held()
        store.delete([(location / CONFIG_FNAME).key])
        last = set() if commit is None else {commit.number}
        # The last one goes last: an older commit must not come to light again.
        for some in ({*decided} - last - fences, last):
            store.delete([(location / f"{COMMITS}/{number}.json").key for number in some])
        _clear(location, {*found} if commit is None else {*found, commit.attempt})
        earlier = [(location / f"{CLAIMS}/{number}.json").key for number in claims[:-1]]
        store.delete([*earlier, *beats])
        claim.forget()
        store.delete([(location / f"{CLAIMS}/{claim.claim.number}.json").key])
    except Exception:
        with _tolerant("a removal was not noted as ended: the next save waits for a while"):
            claim.end()
        raise
    finally:
        claim.stop()


def _publish(location: ObjectPath, attempt: str, config: CheckpointingConfig) -> None:
    # The folder of the data is a checkpoint by itself: for other tools, and to be downloaded.
    for folder in (location / DATA / attempt, location):
        put_surely(folder / CONFIG_FNAME, json.dumps(asdict(config)).encode())


def _clear(location: ObjectPath, attempts: Iterable[str]) -> None:
    """Delete the data of saves that cannot commit any more, or were replaced."""
    for attempt in attempts:
        object_store_locks.delete_below(location / DATA / attempt)
        location.store.delete([(location / f"{BEATS}/{attempt}").key])


@contextmanager
def _tolerant(what: str) -> Iterator[None]:
    """Log errors of the store: the work is done, or its error is told already."""
    try:
        yield
    except (OSError, CheckpointingException) as error:
        logger.warning("%s: %s", what, error)
