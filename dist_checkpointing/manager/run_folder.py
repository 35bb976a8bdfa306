"""The folder of a run: its record, its committed steps, deletion of what retention drops."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    Finding,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import check_room, is_folder, is_there, moments
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.format.commit import (
    begin_attempt,
    check_is_distributed_checkpoint,
    data_folder,
    finish_commit,
    is_committed,
    tolerant,
)
from dist_checkpointing.format.leftovers import attempt_of
from dist_checkpointing.format.removal import is_leftover, remove_checkpoint
from dist_checkpointing.format.run_steps import (
    NO_STEP,
    RECORD_NAME,
    STEP_FOLDER,
    RunRecord,
    StepRecord,
    latest_step,
    read_record,
    remove_old_claims,
    step_folder,
    steps_of_manager,
    up_to_date,
    write_record,
)
from dist_checkpointing.manager.retention import Due, Retention
from dist_checkpointing.serialization.load_metadata import remove_sharded_tensors
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)
_THREADS: Final = 16


_NO_PREFIX: Final = "\0no tensor\0"
"""A prefix that no key has."""
_REPLACED: Final = ".replaced"
"""Ends the name of a checkpoint on a disk that a save replaces, until that has committed."""
_STAGED: Final = ".staged"
"""Ends the name of a copy on a disk, until all of it is there and has been compared."""


class RunFolder:
    """The checkpoints of one run in one folder, each step in a folder of its own.

    No method is collective; only rank 0 may call methods that change files. ``also_kept`` gives
    steps that must be kept for another reason than retention.
    """

    def __init__(
        self,
        root: Any,
        retention: Retention,
        also_kept: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        if retention.drop_optimizer_after is not None:
            remedy = "Leave it out; dckpt convert --exclude PATTERN makes a checkpoint without it."
            location.require_local(root, "Retention(drop_optimizer_after=)", remedy)
        self.root: Path = root
        self.is_on_disk: Final = isinstance(root, Path)
        self._retention = retention
        self._also_kept = also_kept
        self._name: Final = uuid.uuid4().hex
        self._has_saved = False
        self._begun = StepRecord()  # what the save that has claimed its folder last will be
        # Steps in a store without the commit that the record names, as far as this manager knows.
        self._broken: set[int] = set()
        self._set_aside: FolderLock | None = None
        self._without_optimizer: set[int] = set()
        # One thread commits and moves the pointer while the training may ask for steps.
        self._lock = threading.RLock()

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether or not it exists."""
        folder: Path = step_folder(self.root, step)
        return folder

    def finish_commits(self) -> None:
        """Finish what a killed save had committed, or put back what it would have replaced."""
        self.finish_replacing()
        with tolerant(f"a commit in {self.root} could not be finished"):
            for step in self._steps_that(lambda folder: not is_committed(folder)):
                self._broken.add(step)
                finish_commit(self.folder(step))
                if is_committed(self.folder(step)):
                    self._broken.discard(step)

    def set_aside(self, step: int) -> None:
        """Make room for a save of a step, on a disk; its checkpoint stays until that has committed.

        Its lock is held until then, so that no other manager puts it back.
        """
        with self._lock:
            folder = self.folder(step)
            if is_committed(folder):
                self.finish_replacing(folder.name)
                lock = FolderLock.acquire(folder)
                try:
                    folder.rename(folder.with_name(f"{folder.name}{_REPLACED}"))
                except BaseException:
                    lock.release()
                    raise
                self._set_aside = lock

    def staged(self, step: int) -> Path:
        """Where a copy of a step is made, on a disk."""
        return self.root / f"{self.folder(step).name}{_STAGED}"

    def put_in_place(self, step: int) -> None:
        """Give a copy of a step, on a disk, the name of the step."""
        with self._lock:
            folder = self.folder(step)
            self.set_aside(step)
            _clear(folder)
            self.staged(step).rename(folder)

    def end_replacing(self) -> None:
        """Do what is left of a save of this manager that has set something aside, and has ended."""
        if self._set_aside is not None:
            self._set_aside.release()
            self._set_aside = None
            self.finish_replacing()

    def finish_replacing(self, own: str = "") -> None:
        """Delete what was set aside for saves that have committed; put back what was for others.

        A copy that is about to get the name ``own`` stays.
        """
        with self._lock, tolerant(f"what was set aside in {self.root} stays there"):
            for name in location.names_in(self.root) if self.is_on_disk else ():
                step, ending = Path(name).stem, Path(name).suffix
                folder, aside = self.root / step, self.root / name
                if ending not in (_REPLACED, _STAGED) or not STEP_FOLDER.fullmatch(step):
                    continue
                if ending == _STAGED:
                    if step != own:
                        _clear(aside)
                    continue
                FolderLock.acquire(aside).release()  # refused while the save goes on
                if is_committed(folder) or not is_committed(aside):
                    remove_checkpoint(aside)
                    continue
                _clear(folder)
                aside.rename(folder)

    def committed_steps(self) -> list[int]:
        """Every step that is committed, oldest first."""
        return self._steps_that(check_is_distributed_checkpoint)

    def _steps_that(self, look: Callable[[Path], bool]) -> list[int]:
        """The steps of which a look at their folders says yes, oldest first."""
        steps, threads = steps_of_manager(self.root)[::-1], 1 if self.is_on_disk else _THREADS
        answers = in_threads(look, [*map(self.folder, steps)], threads)
        return [step for step, answer in zip(steps, answers, strict=True) if answer]

    def history(self) -> list[int]:
        """Every step of the history that has a folder, newest first."""
        return self.record().history(steps_of_manager(self.root))

    def newest(self) -> int | None:
        """The newest step of the history that the record knows."""
        record = self.record()
        return next(iter(record.history(record.steps)), None)

    def go_back_with(self, other: RunRecord) -> None:
        """Let the run have come to the last step of its history that is one of another record's."""
        for record in self._changing():
            if record.latest is not None:
                known = record.steps
                line = {s: other.steps.get(s, known[s]) for s in other.history(known)}
                history = (s for s in record.history(known) if s in line)
                same = (s for s in history if line[s].attempt == known[s].attempt)
                record.latest = next(same, NO_STEP)

    def catch_up_with(self, other: RunRecord) -> None:
        """Take over the history of another record of this run, if it has gone on from this one."""
        for record in self._changing():
            if _knows_latest(other, record) and not _knows_latest(record, other):
                record.latest, record.steps = other.latest, {**record.steps, **other.steps}

    def lacks(self, step: int, attempt: str | None, record: RunRecord) -> bool:
        """Whether a save of a disk is not here: nothing is, or another one that was abandoned, or
        that this one replaces.
        """
        if not is_committed(self.folder(step)):
            return True
        known = record.steps.get(step, StepRecord())
        return attempt == known.begun or (step in record.abandoned and known.attempt != attempt)

    def begin(self, step: int, newest: int | None) -> tuple[int, bool]:
        """Record that this manager will write the folder of a step, before the folder exists.

        CheckpointExistsError if another manager has saved here since this one did.

        Returns:
            The step that the save grows from, where the run has come to ``newest``, and whether a
            manager of this root wrote what is in the folder.
        """
        check_room(self.root, 0)
        with self._lock:
            # Once: another process may be writing one later, to note that it has verified a step.
            if not self._has_saved:
                remove_old_claims(self.root)
            is_here = (is_there if self.is_on_disk else is_folder)(self.folder(step))
            for record in self._changing():
                if self._has_saved and self._name not in (record.writer or self._name):
                    finding = Finding(
                        "another manager has saved here since this one did",
                        found=f"{record.writer}; the latest step is {record.latest} now",
                        path=str(self.root),
                        remedy="End one of the two runs, or give each a separate folder.",
                    )
                    raise CheckpointExistsError("two managers save into one folder", [finding])
                if not is_here:
                    record.steps.setdefault(step, StepRecord())
            newest = NO_STEP if newest is None else newest
            history = record.history([*record.steps, newest, NO_STEP], newest)
            parent = next(s for s in history if s < step)
            return parent, is_here and self.wrote(step, record)

    def claimed(self, step: int, metric: float | None, parent: int, attempt: str) -> None:
        """Record which save is about to write a step, in case this process does not see its end."""
        self._begun = StepRecord(attempt, metric=metric, parent=parent)
        for record in self._changing(own=step):
            known = record.steps.get(step, StepRecord())
            record.steps[step] = replace(
                known, begun=attempt, begun_metric=metric, begun_parent=parent
            )

    def committed(self, step: int, *, is_latest: bool = True) -> None:
        """Move the pointer to the step that was claimed last, durably, now that it is committed.

        Then delete what retention asks for.
        """
        with self._lock:
            self._broken.discard(step)
            for record in self._changing(own=step):
                if record.steps.get(step, StepRecord()).begun != self._begun.attempt:
                    break  # another manager has noted it, and may have gone on from there
                record.commit(step, self._begun, is_latest=is_latest)
            location.fsync_folder(self.root)
            self.end_replacing()
            self.apply_retention(record)

    def apply_retention(self, record: RunRecord | None = None) -> None:
        """Delete what retention asks for; errors are logged, and must not end a training.

        ``record`` is what has just been written. What it names in a store is not looked at before
        it is due: that takes as many requests for a thousand steps as for one.
        """
        with self._lock, tolerant(f"retention could not go through {self.root}"):
            record = self.record() if record is None else record
            found = steps_of_manager(self.root)
            left, due = self._due(record, found)
            gone: dict[int, str | None] = {}
            for step in [*left, *due.delete]:
                # The next pass tries again.
                with tolerant(f"retention could not deal with step {step}"):
                    if step in due.delete:
                        with suppress(CheckpointNotFoundError):  # it is somebody else's now
                            self._remove(step, record.steps[step].attempt)
                    elif step in found and not is_leftover(self.folder(step)):
                        self._broken.discard(step)
                        continue
                    elif step in found:
                        self._remove(step, None)
                    gone[step] = record.steps[step].attempt
            if gone:
                self._forget(gone)
            done = {s for s in due.strip if record.steps[s].stripped} | self._without_optimizer
            for step in (step for step in due.strip if step not in done):
                with tolerant(f"retention could not deal with step {step}"):
                    self._strip(step)

    def _due(self, record: RunRecord, found: Iterable[int]) -> tuple[list[int], Due]:
        """The steps that may have left something without a commit, and what is due of ``found``."""
        latest = record.latest
        if latest is None:
            return [], Due((), ())
        named = (latest, record.last_verified, *self._also_kept())
        protected = {step for step in named if step is not None}
        written = [step for step in found if self._is_ours(step, record)]
        others = record.steps.keys() - {*written} - protected
        left = sorted(step for step in others if self._set_aside is None and step < latest)
        history = record.history(written)
        return left, self._retention.due(written, protected, record.metrics, history)

    def _is_ours(self, step: int, record: RunRecord) -> bool:
        """Whether a manager of this root has committed a step; a store is not asked for that."""
        if not self.is_on_disk:
            known = record.steps.get(step, StepRecord())
            return known.attempt is not None and step not in self._broken
        return self.wrote(step, record) and check_is_distributed_checkpoint(self.folder(step))

    def _remove(self, step: int, attempt: str | None) -> None:
        self._broken.add(step)  # if this does not come to its end
        folder = self.folder(step)
        aside = folder.parent / f"{folder.name}{_REPLACED}"
        if self.is_on_disk and is_there(aside):  # else it would be put back
            remove_checkpoint(aside)
        remove_checkpoint(folder, attempt)
        self._broken.discard(step)

    def record(self) -> RunRecord:
        """The record, updated with what is committed."""
        return up_to_date(self.root, read_record(self.root))

    def _changing(
        self, own: int | None = None, stored: RunRecord | None = None
    ) -> Iterator[RunRecord]:
        """The record, for a body that changes it; again if others have changed it meanwhile.

        The ``own`` step, which this manager saves, is not looked at, and the record is signed.
        ``stored`` is what has been read.
        """
        with self._lock:
            for _ in moments():
                stored = read_record(self.root) if stored is None else stored
                record = up_to_date(self.root, stored, {None, self._begun.attempt}, own)
                yield record
                if own is not None:
                    process = f"process {os.getpid()} on host {socket.gethostname()}"
                    now = time.strftime("%Y-%m-%d %H:%M:%S")
                    record.writer = f"{process}, {now}, manager {self._name}"
                    self._has_saved = True
                if record == stored:
                    return
                if write_record(self.root, record):  # a power cut leaves the old one or this one
                    return
                stored = None
        raise CheckpointingException(f"others change {self.root / RECORD_NAME} all the time")

    def note(self, step: int, **flags: Any) -> None:
        """Record that a step was verified or stripped, if it is known."""
        for record in self._changing():
            if step in record.steps:
                record.steps[step] = replace(record.steps[step], **flags)

    def delete(self, step: int) -> None:
        """Delete a checkpoint that a manager of this root wrote.

        Raises:
            CheckpointingException: if no manager of this root wrote it, or if it is the last
                verified one.
        """
        stored = read_record(self.root)
        record = up_to_date(self.root, stored)
        attempt = record.steps.get(step, StepRecord()).attempt
        problem = "no manager of this root wrote it"
        if step == record.last_verified:
            problem = "it is the last checkpoint that is known to be valid"
        elif attempt is not None:
            with suppress(CheckpointNotFoundError):
                self._remove(step, attempt)
                problem = ""
        if problem:
            finding = Finding(problem, path=str(self.folder(step)), remedy="Delete it by hand.")
            raise CheckpointingException(f"step {step} is not deleted", [finding])
        self._forget({step: attempt}, stored)

    def _forget(self, gone: Mapping[int, str | None], stored: RunRecord | None = None) -> None:
        """Record that these saves of steps are deleted; other managers may have saved others."""
        for record in self._changing(stored=stored):
            for step, attempt in gone.items():
                if record.steps.get(step, StepRecord()).attempt in (None, attempt):
                    record.forget(step)

    def wrote(self, step: int, record: RunRecord) -> bool:
        """Whether a manager of this root wrote what is in the folder of a step."""
        attempt = record.steps.get(step, StepRecord()).attempt
        return attempt is not None and attempt == attempt_of(data_folder(self.folder(step)))

    def _strip(self, step: int) -> None:
        folder = self.folder(step)
        prefixes = self._optimizer_prefixes(step)
        # Without tensors to delete, this completes a removal that was interrupted.
        for prefix in prefixes or [_NO_PREFIX]:
            remove_sharded_tensors(folder, prefix, comm=SingleProcess())
        latest = latest_step(self.root)
        if prefixes or (latest is not None and self._optimizer_prefixes(latest)):
            self.note(step, stripped=True)
            return
        # Not recorded as stripped: a run with another prefix can still strip it.
        if not self._without_optimizer:
            known = self._retention.optimizer_prefix
            logger.warning(
                "retention should delete the optimizer state of step %d, but no key of it %s: "
                "nothing was deleted; pass the prefix of its keys: Retention(optimizer_prefix=...)",
                step,
                "looks like an optimizer's" if known is None else f"begins with {known!r}",
            )
        self._without_optimizer.add(step)

    def _optimizer_prefixes(self, step: int) -> list[str]:
        return self._retention.prefixes(Checkpoint.open(self.folder(step)).index)


def _clear(folder: Path) -> None:
    """Delete what a save or a copy has left on a disk, if it does not go on."""
    if is_there(folder):
        is_copy = folder.name.endswith(_STAGED)
        # A save knows how to clear away what a kill may leave in the middle of a claim.
        begin_attempt(folder, (), Durability.PAGE_CACHE, overwrite=is_copy).release()
        remove_checkpoint(folder)


def _knows_latest(record: RunRecord, other: RunRecord) -> bool:
    """Whether one record has the save, if any, that the run has come to in the other."""
    step = NO_STEP if other.latest is None else other.latest
    save = other.steps.get(step, StepRecord()).attempt
    return save in (None, record.steps.get(step, StepRecord()).attempt)
