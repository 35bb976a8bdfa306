"""The folder of a run, as rank 0 sees it: the record, what is committed, what goes."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from dist_checkpointing.checkpoint.handle import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.local import check_room, is_folder, is_there
from dist_checkpointing.format.commit import (
    check_is_distributed_checkpoint,
    is_committed,
    is_spent,
    remove_checkpoint,
)
from dist_checkpointing.format.leftovers import attempt_of, number_of_save
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.run_record import (
    RunRecord,
    StepRecord,
    clear_temporaries,
    read_record,
    write_record,
)
from dist_checkpointing.serialization.readers import remove_sharded_tensors
from dist_checkpointing.storage.options import Durability

logger = logging.getLogger(__name__)

_NO_PREFIX: Final = "\0no tensor\0"
"""No tensor has a key that begins so."""

_FOLDER: Final = re.compile(r"step-(\d+)")


class RunFiles:
    """Checkpoints of one run below one root, one folder a step. Nothing here is collective.

    Whatever changes files is for rank 0 alone.

    Args:
        root: of the run.
        retention: which checkpoints are kept.
    """

    def __init__(self, root: Path, retention: Retention) -> None:
        self.root = root
        self._retention = retention
        self._is_tidy = False
        self._without_optimizer: set[int] = set()
        # The thread that commits moves the pointer while the training may ask for steps.
        self._lock = threading.RLock()

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.root / f"step-{step:08d}"

    def all_steps(self) -> list[int]:
        """Every step that has a folder, newest first."""
        if not is_folder(self.root):
            return []
        found = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir())
        steps = {int(match[1]) for match in found if match is not None}
        return sorted((step for step in steps if is_folder(self.folder(step))), reverse=True)

    def all_saves(self) -> list[tuple[int, int]]:
        """Every step that has a folder, newest first, and the number of the save there."""
        return [(step, number_of_save(self.folder(step))) for step in self.all_steps()]

    def committed_steps(self) -> list[int]:
        """Every step that is committed, oldest first."""
        steps = self.all_steps()
        return [s for s in reversed(steps) if check_is_distributed_checkpoint(self.folder(s))]

    def latest(self) -> int | None:
        """The step that was committed last; the newest committed one if the pointer is lost."""
        pointer = self._current().latest
        if pointer is not None and check_is_distributed_checkpoint(self.folder(pointer)):
            return pointer
        return max(self.committed_steps(), default=None)

    def begin(self, step: int, damaged: int | None) -> bool:
        """Note that the folder of a step will be ours, before there is anything in it.

        Args:
            step: about to be saved.
            damaged: number of the save of this step that was found damaged; None for none.

        Returns:
            Whether what is there makes room: it is that damaged save, and ours.
        """
        check_room(self.root, 0)
        with self._lock:
            if not self._is_tidy:
                clear_temporaries(self.root)
                self._is_tidy = True
            stored = read_record(self.root)
            record = self._current()
            folder = self.folder(step)
            if step not in record.steps and not is_there(folder):
                record = record.with_step(step, StepRecord())
            if record != stored:
                self._write(record, Durability.PAGE_CACHE)
            return (
                damaged is not None
                and damaged == number_of_save(folder)
                and self._is_own(record, step)
            )

    def claimed(self, step: int, attempt: str) -> None:
        """Note which save is about to write a step: should its end not be seen, it is known."""
        with self._lock:
            record = self._current()
            known = record.steps.get(step, StepRecord())
            changed = record.with_step(step, replace(known, begun=attempt))
            self._write(changed, Durability.PAGE_CACHE)

    def committed(self, step: int) -> None:
        """Move the pointer to a step that is committed, durably, and then let old ones go."""
        with self._lock:
            known = StepRecord(attempt_of(self.folder(step)))
            record = replace(self._current().with_step(step, known), latest=step)
            self._write(record, Durability.FSYNC)
            try:
                self._thin_out(record)
            except (OSError, CheckpointingException) as error:
                # What cannot be looked at must not end a training either.
                logger.warning("retention could not go through %s: %s", self.root, error)

    def _current(self) -> RunRecord:
        """The record, brought up to date with what is committed.

        The pointer only remembers that. A process that was killed between a commit and the pointer
        has left it behind, and so has a rank that was lost.
        """
        record = read_record(self.root)
        for step, known in sorted(record.steps.items()):
            if known.attempt is not None and known.begun is None:
                continue
            folder = self.folder(step)
            if not is_committed(folder):
                continue
            if known.begun is not None and known.begun == attempt_of(folder):
                record = replace(record.with_step(step, StepRecord(known.begun)), latest=step)
            elif known.attempt is None and (record.latest is None or step > record.latest):
                # Noted by an older version, or saved by somebody else: there, but not ours.
                record = replace(record, latest=step)
        return record

    def verified(self, step: int) -> None:
        """Note that all of a step has been read back and compared."""
        self._change(step, lambda known: replace(known, verified=True))

    def delete(self, step: int) -> None:
        """Delete a checkpoint that a manager of this root wrote.

        Raises:
            CheckpointingException: if none did, or if the step is the last verified one.
        """
        with self._lock:
            record = self._current()
            problem = None
            if not self._is_own(record, step):
                problem = "no manager of this root wrote it"
            elif step == record.last_verified:
                problem = "it is the last checkpoint that is known to be valid"
            if problem is not None:
                finding = Finding(problem, path=str(self.folder(step)), remedy="Delete it by hand.")
                raise CheckpointingException(f"step {step} is not deleted", [finding])
            if record.latest == step:
                others = [other for other in self.committed_steps() if other != step]
                self._write(replace(record, latest=max(others, default=None)), Durability.FSYNC)
            self._remove(step)

    def _thin_out(self, record: RunRecord) -> None:
        committed = self.committed_steps()
        # What was saved after going back to an older step counts; what lies ahead of it stays.
        latest = record.latest
        assert latest is not None
        own = [step for step in committed if self._is_own(record, step) and step <= latest]
        protected = [step for step in (latest, record.last_verified) if step is not None]
        due = self._retention.due(own, protected)
        leftovers = [
            step
            for step in record.steps
            if step < latest
            and not is_committed(self.folder(step))
            and (attempt_of(self.folder(step)) is not None or is_spent(self.folder(step)))
        ]
        for step in (*leftovers, *due.delete):
            self._try_to(self._remove, step)
        for step in due.strip:
            if not record.steps[step].stripped and step not in self._without_optimizer:
                self._try_to(self._strip, step)

    @staticmethod
    def _try_to(work: Callable[[int], None], step: int) -> None:
        """What cannot be deleted must not end a training: the next pass tries again."""
        try:
            work(step)
        except (OSError, CheckpointingException) as error:
            logger.warning("retention could not deal with step %d: %s", step, error)

    def _is_own(self, record: RunRecord, step: int) -> bool:
        known = record.steps.get(step)
        return (
            known is not None
            and known.attempt is not None
            and known.attempt == attempt_of(self.folder(step))
        )

    def _remove(self, step: int) -> None:
        if is_there(self.folder(step)):
            remove_checkpoint(self.folder(step))
        self._write(self._current().without_step(step), Durability.PAGE_CACHE)

    def _strip(self, step: int) -> None:
        folder = self.folder(step)
        prefixes = self._optimizer_prefixes(step)
        # Without tensors to drop it brings a removal that was cut off to its end.
        for prefix in prefixes or [_NO_PREFIX]:
            remove_sharded_tensors(folder, prefix, comm=SingleProcess())
        latest = self.latest()
        if prefixes or (latest is not None and self._optimizer_prefixes(latest)):
            self._change(step, lambda known: replace(known, stripped=True))
            return
        # Not noted as stripped: a run with another prefix finds it.
        if not self._without_optimizer:
            known = self._retention.optimizer_prefix
            logger.warning(
                "retention should drop the optimizer state of step %d, and none of its keys %s: "
                "nothing was dropped; say what they begin with: Retention(optimizer_prefix=...)",
                step,
                "says that it is an optimizer's" if known is None else f"begins with {known!r}",
            )
        self._without_optimizer.add(step)

    def _optimizer_prefixes(self, step: int) -> list[str]:
        return self._retention.prefixes(Checkpoint.open(self.folder(step)).index)

    def _change(self, step: int, change: Callable[[StepRecord], StepRecord]) -> None:
        with self._lock:
            record = self._current()
            known = record.steps.get(step)
            if known is not None:
                changed = record.with_step(step, change(known))
                self._write(changed, Durability.PAGE_CACHE)

    def _write(self, record: RunRecord, durability: Durability) -> None:
        write_record(record, self.root, durability)
