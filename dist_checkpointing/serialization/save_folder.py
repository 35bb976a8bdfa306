"""The folder of a save: claimed, seen by all ranks, sealed and committed, or given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from dist_checkpointing.comm import Comm
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    Finding,
    RankFailedError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.local_folder import remove
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import leftovers
from dist_checkpointing.format.commit import (
    Attempt,
    CheckpointingConfig,
    StoreAttempt,
    begin_attempt,
    check_distinct,
    tolerant,
)
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import MAX_SEAL_BYTES, SEAL_NAME, SealedFile, write_seal
from dist_checkpointing.storage.driver import Finished
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.options import Durability

logger: logging.Logger = logging.getLogger(__name__)


class Disks(NamedTuple):
    """The disks of a save whose ranks do not share one: each gets what its own ranks write.

    Rank 0 claims, seals and commits on its own disk. The lowest rank of every other disk claims
    the folder there for the same attempt, and notes the commit when it has happened.

    Attributes:
        destination: Name of the checkpoint, the same on all ranks, whose folders may differ.
        leads: Whether this rank is the lowest one of its disk, which calls the hooks.
        on_part: Called on these ranks but rank 0, once the checkpoint is committed.
    """

    destination: str
    leads: bool
    on_part: Callable[[], None]


@dataclass(frozen=True, slots=True)
class SaveHooks:
    """What code of this library adds to a save; a user has no use for it.

    Attributes:
        before_claim: Called on rank 0 with what the checkpoint will hold (nothing, for third-party
            strategies) before the folder is touched; what it raises, all ranks raise.
        after_claim: Called on rank 0 with the name of this attempt (``.dckpt/attempt.json`` holds
            it), before anything is written; what it raises, all ranks raise.
        after_commit: Called on rank 0 once the checkpoint is there, and stays; what it raises, all
            ranks raise.
        disks: The disks of a save whose ranks do not share one. The folder of a rank then holds a
            part of the checkpoint, which only CheckpointManager loads.
        at_end: Called on all ranks, once every disk has noted the commit.
    """

    before_claim: Callable[[Index], None] = lambda _: None
    after_claim: Callable[[str], None] = lambda _: None
    after_commit: Callable[[], object] | None = None
    disks: Disks | None = None
    at_end: Callable[[], None] | None = None

    def call_after_commit(self, comm: Comm) -> None:
        """Call ``after_commit``, if there is one. Collective."""
        if self.after_commit is not None:
            with comm.agreed("after the commit"):
                if comm.rank == 0:
                    self.after_commit()
        if self.at_end is not None:
            self.at_end()


class _Claim(NamedTuple):
    """What rank 0 has claimed.

    ``folder`` is the absolute path of the checkpoint on rank 0, and ``data``, relative to it, where
    its files are. ``creates`` are relative names of what the save makes, if other disks must know
    them.
    """

    attempt: str
    folder: str
    data: str
    config: CheckpointingConfig
    creates: tuple[str, ...]


def partial_folder(file: Location) -> Location:
    """The hidden folder in which a file is written."""
    return file.parent / f".{file.name}.dckpt-partial"


class SaveFolder:
    """The folder of one save, on one rank; ``config`` and ``durability`` are set before ``claim``.

    ``path`` is absolute. Files lie in ``data``, which is another folder in an object store, once it
    is claimed. ``destination`` is a name that must be the same on all ranks. What is saved as one
    ``file`` is written in a hidden folder beside it.
    """

    claimed: _Claim
    config: CheckpointingConfig
    durability: Durability

    def __init__(
        self,
        path: str | PathLike[str],
        hooks: SaveHooks,
        *,
        overwrite: bool,
        is_file: bool = False,
    ) -> None:
        # Whoever writes may do so when the working directory is another one.
        self.path = self.data = folder = location.as_location(path).absolute()
        self.file = folder if is_file else None
        if is_file:
            self.path = self.data = partial_folder(folder)
        self._hooks, self.disks, self._overwrite = hooks, hooks.disks, overwrite
        self.destination = (
            str(self.file or self.path) if self.disks is None else self.disks.destination
        )
        self._attempt: Attempt | StoreAttempt | None = None

    def claim(
        self,
        comm: Comm,
        planned: Outcome[Index],
        created_names: Callable[[Index], Iterable[str]],
        *,
        durable: bool,
    ) -> None:
        """Claim the folder, if all ranks have planned. Collective.

        If not ``durable``, nobody waits for the disk here, and ``make_durable`` must follow.
        """
        self._is_durable = durable

        def begin() -> _Claim:
            index = planned.result
            assert index is not None
            self._hooks.before_claim(index)
            if self.file is not None and location.is_there(self.file) and not self._overwrite:
                remedy = "Name another path, or pass overwrite=True to replace it."
                finding = Finding("something is here", path=str(self.file), remedy=remedy)
                raise CheckpointExistsError(f"{self.file} already exists", [finding])
            names = [SEAL_NAME, *created_names(index)]
            check_distinct(names)
            if self.disks is not None:
                names.append(leftovers.PARTS_NAME)
            attempt = self._begin(names)
            creates = () if self.disks is None else attempt.creates
            data = location.relative(attempt.folder, self.path)
            return _Claim(attempt.id, str(self.path), data, self.config, creates)

        claimed = comm.from_rank0("claiming the folder", begin, after=planned)
        if self.disks is not None:
            with comm.agreed("claiming the folder on every disk"):
                if self.disks.leads and comm.rank:
                    assert planned.result is not None
                    self._hooks.before_claim(planned.result)
                    self._begin(claimed.creates, claimed.attempt)
        self.claimed, self.data = claimed, self.path / claimed.data

    def _begin(self, creates: Iterable[str], name: str | None = None) -> Attempt | StoreAttempt:
        with location.explained_full_disk(self.path, "the record of this save"):
            attempt = begin_attempt(
                self.path, creates, self.durability, overwrite=self._overwrite, name=name
            )
        self._attempt = attempt
        self._hooks.after_claim(attempt.id)
        if self._is_durable:
            attempt.make_durable()
        return attempt

    def make_durable(self, comm: Comm) -> None:
        """Make durable what a crash must not lose, before a byte is written. Collective.

        Does nothing if ``claim`` did.
        """
        if self._is_durable:
            return
        self._is_durable = True
        with comm.agreed("claiming the folder"):
            if self._attempt is not None:
                self._attempt.make_durable()
            self.check(comm.rank)

    def check(self, rank: int) -> None:
        """Refuse a rank that does not see what rank 0 has durably claimed, or saves otherwise."""
        claimed = self.claimed
        if rank == 0 or not self._is_durable:
            return
        if self.config != claimed.config:
            finding = Finding(
                "ranks save in different formats",
                expected=f"{claimed.config}, as on rank 0",
                found=self.config,
                ranks=(rank,),
                remedy="Pass the same strategies on every rank.",
            )
            raise CheckpointingException("the ranks do not save the same checkpoint", [finding])
        if not location.is_seen(lambda: leftovers.is_in_attempt(self.data, claimed.attempt)):
            finding = Finding(
                "this rank does not see the folder that rank 0 has claimed",
                expected=f"{claimed.folder}, as on rank 0",
                found=str(self.data.absolute()),
                ranks=(rank,),
                path=str(self.data / leftovers.ATTEMPT_NAME),
                remedy="Save to a file system that all ranks share, under the same path.",
            )
            raise CheckpointingException("the ranks do not save into one folder", [finding])

    def commit(self, comm: Comm, describe: Callable[[], Finished], writer: StorageWriter) -> None:
        """Seal what all ranks have written, and turn it into a checkpoint. Collective.

        ``describe`` is called on all ranks, and must say on rank 0 what the files are. Of a
        ``writer`` that is opaque, files that it does not name belong to the checkpoint too.
        """
        attempt, is_durable = self._attempt, self.durability is Durability.FSYNC
        if self.disks is not None:
            # Rank 0 cannot make the names on other disks durable.
            with comm.agreed("securing every disk"):
                if attempt is not None and comm.rank and is_durable:
                    location.fsync_folders(location.files_below(self.path), self.path, to_root=True)
        described = location.explained_full_disk(self.path, "what describes the checkpoint")
        with comm.agreed("committing"), described:
            files, tables = describe()
            if attempt is not None and comm.rank == 0:
                # Not read again: of a save that another one has ended it may be gone.
                noted = leftovers.attempt_json(attempt.id, attempt.creates)
                write_seal(
                    self.data,
                    self.config,
                    [*files, SealedFile.of_bytes(leftovers.ATTEMPT_NAME, noted)],
                    attempt=attempt.id,
                    tables=tables,
                    created=None if writer.is_opaque else attempt.creates,
                    durability=self.durability,
                    is_all_here=self.disks is None,
                )
                if writer.commit_file is None:
                    attempt.commit(self.config)
                else:
                    assert isinstance(attempt, Attempt)
                    attempt.commit_as_foreign(*writer.commit_file, self.file)
        if self.disks is not None:
            self._attempt = None  # nothing is removed from here on
            self._note_commit(attempt, self.disks, comm)

    def _note_commit(self, part: Attempt | StoreAttempt | None, disks: Disks, comm: Comm) -> None:
        """Note on every disk but rank 0's that rank 0 has committed, and of what. Collective.

        A part on which this is not noted can still be used.
        """
        seal_path = self.path / SEAL_NAME
        try:
            content = comm.from_rank0(
                "telling every disk of the commit",
                lambda: location.read_bytes(seal_path, MAX_SEAL_BYTES),
            )
            if part is None or comm.rank == 0:
                return
            try:
                location.write(seal_path, content, self.durability)
                part.commit(self.config)
            except OSError as error:
                logger.warning("%s: the commit is not noted on this disk: %s", self.path, error)
            disks.on_part()
        finally:
            if part is not None:
                part.release()

    def give_up(self, error: BaseException) -> None:
        """Clear away what was written, if all ranks have stopped; else leave it to the next save.

        An interrupt is no agreement, and nobody knows what a rank does that does not answer: they
        may still write, and what they wrote must stay named as ours. (Should all but the last
        agreement have come about, a checkpoint stays.)
        """
        if self._attempt is None:
            return
        is_silent = isinstance(error, RankFailedError) and bool(error.silent_ranks)
        if isinstance(error, CheckpointingException) and not is_silent:
            self._attempt.abandon()
            if self.file is not None and isinstance(self.path, Path):
                with tolerant("a hidden folder of a failed save stays"):
                    remove(self.path, self.path.parent)
        else:
            self._attempt.release()
        self._attempt = None
