"""The folder of a run: its record, its committed steps, deletion of what retention drops."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.location import check_room, folders_and_files, is_there
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import (
    check_is_distributed_checkpoint,
    data_folder,
    finish_commit,
    is_committed,
    tolerant,
)
from dist_checkpointing.format.leftovers import attempt_of, number_of_save
from dist_checkpointing.format.removal import is_leftover, remove_checkpoint
from dist_checkpointing.manager.retention import Retention
from dist_checkpointing.manager.save_log import call_hooks
from dist_checkpointing.serialization.load_metadata import remove_sharded_tensors
from dist_checkpointing.storage.options import Durability

logger: logging.Logger = logging.getLogger(__name__)
RECORD_NAME: Final = "manager.json"
_FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 26


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known about one step.

    Attributes:
        attempt: Name of the save that committed it; None if none has.
        verified: Whether all of it has been read back and compared.
        stripped: Whether its optimizer state has been deleted.
        begun: Name of the save that claimed its folder after that, and is not known to have
            committed.
        metric: Metric that was passed to its save.
    """

    attempt: str | None = None
    verified: bool = False
    stripped: bool = False
    begun: str | None = None
    metric: float | None = None


@dataclass(slots=True)
class RunRecord:
    """The pointer, and what is known about every step that the manager has begun to write.

    ``latest`` is the step that was last committed, durably, before this was written.
    """

    latest: int | None = None
    steps: dict[int, StepRecord] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The content of the file."""
        steps = {
            # Older versions do not know begun and metric, which are rarely there.
            str(step): {
                name: value
                for name, value in asdict(known).items()
                if name not in ("begun", "metric") or value is not None
            }
            for step, known in sorted(self.steps.items())
        }
        content = {"format": _FORMAT, "latest": self.latest, "steps": steps}
        return json.dumps(content).encode()

    @property
    def metrics(self) -> dict[int, float]:
        """The metric of each step that has one."""
        return {s: r.metric for s, r in self.steps.items() if r.metric is not None}

    @property
    def last_verified(self) -> int | None:
        """The newest step that was verified and has its optimizer state."""
        return max(
            (s for s, r in self.steps.items() if r.verified and not r.stripped), default=None
        )


def read_record(root: Location) -> RunRecord:
    """The record of a folder; an empty one if it is missing or cannot be parsed.

    It is safe to lose the record: a manager deletes only what its record names. OSError if the file
    system fails.
    """
    path = root / RECORD_NAME
    try:
        with local_folder.parsing("it cannot be read and is not used", path):
            return _parsed(location.read_json(path, _MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except CorruptCheckpointError as error:
        logger.warning("%s", error)
    return RunRecord()


def _parsed(content: Any) -> RunRecord:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}")
    steps = {int(step): StepRecord(**known) for step, known in content["steps"].items()}
    latest = content["latest"]
    if type(latest) not in (int, NoneType):
        raise ValueError(f"latest is {latest!r}")
    for record in steps.values():
        are_names = {type(record.attempt), type(record.begun)} <= {str, NoneType}
        are_flags = {type(record.verified), type(record.stripped)} == {bool}
        if not (are_names and are_flags and type(record.metric) in (float, int, NoneType)):
            raise ValueError(f"{record!r}")
    return RunRecord(latest, steps)


_NO_PREFIX: Final = "\0no tensor\0"
"""A prefix that no key has."""
_FOLDER: Final = re.compile(r"step-(\d+)")


class RunFolder:
    """The checkpoints of one run in one folder, each step in a folder of its own.

    No method is collective; only rank 0 may call methods that change files. ``on_deleted`` is
    called with each step whose checkpoint was deleted; ``also_kept`` gives steps that must be kept
    for another reason than retention.
    """

    def __init__(
        self,
        root: Any,
        retention: Retention,
        on_deleted: Callable[[int], object] = lambda _: None,
        also_kept: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        self.root: Path = root
        self._on_deleted = on_deleted
        self._retention = retention
        self._also_kept = also_kept
        self._is_tidy = False
        self._without_optimizer: set[int] = set()
        # One thread commits and moves the pointer while the training may ask for steps.
        self._lock = threading.RLock()

    def folder(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether or not it exists."""
        return self.root / f"step-{step:08d}"

    def finish_commits(self) -> None:
        """Finish what a killed save had committed in a store, but not yet shown to readers."""
        with tolerant(f"a commit in {self.root} could not be finished"):
            for step in self.all_steps():
                if not is_committed(self.folder(step)):
                    finish_commit(self.folder(step))

    def all_steps(self) -> list[int]:
        """Every step that has a folder, newest first."""
        matches = map(_FOLDER.fullmatch, folders_and_files(self.root)[0])
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def number_of(self, step: int) -> int:
        """A number that tells the saves of a step apart; 0 if this library made none."""
        return number_of_save(data_folder(self.folder(step)))

    def committed_steps(self) -> list[int]:
        """Every step that is committed, oldest first."""
        steps = self.all_steps()
        return [s for s in reversed(steps) if check_is_distributed_checkpoint(self.folder(s))]

    def latest(self) -> int | None:
        """The step that was committed last; the newest committed step if the pointer is lost."""
        pointer = self._current().latest
        if pointer is not None and check_is_distributed_checkpoint(self.folder(pointer)):
            return pointer
        return max(self.committed_steps(), default=None)

    def metrics(self) -> dict[int, float]:
        """The metrics of steps that have one."""
        return self._current().metrics

    def base_of(self, step: int, damaged: Mapping[int, int]) -> int | None:
        """The newest committed step that a save of ``step`` may share files with.

        ``damaged`` has, by step, the number of the save that was found damaged.
        """
        for other in [self.latest(), *reversed(self.committed_steps())]:
            if other is None or other == step:
                continue
            if damaged.get(other) != self.number_of(other):
                return other
        return None

    def begin(self, step: int, damaged: int | None) -> bool:
        """Record that this manager will write the folder of a step, before the folder exists.

        Returns:
            Whether the new save may replace the checkpoint there: it is the save that was found
            damaged, whose number is ``damaged``, and a manager of this root wrote it.
        """
        check_room(self.root, 0)
        with self._lock:
            if not self._is_tidy:
                for path in location.temporaries([RECORD_NAME], self.root):
                    path.unlink()
                self._is_tidy = True
            is_here = is_there(self.folder(step))
            with self._changing() as record:
                if not is_here:
                    record.steps.setdefault(step, StepRecord())
            is_damaged = damaged is not None and damaged == self.number_of(step)
            return is_damaged and self.wrote(step, record)

    def claimed(self, step: int, metric: float | None, attempt: str) -> None:
        """Record which save is about to write a step, in case this process does not see its end."""
        with self._changing() as record:
            known = record.steps.get(step, StepRecord())
            record.steps[step] = replace(known, begun=attempt, metric=metric)

    def committed(self, step: int, metric: float | None) -> None:
        """Move the pointer to a committed step, durably; then delete what retention asks for."""
        with self._lock:
            attempt = attempt_of(data_folder(self.folder(step)))
            with self._changing(Durability.FSYNC) as record:
                record.steps[step] = StepRecord(attempt, metric=metric)
                record.latest = step
            self.apply_retention()

    def apply_retention(self) -> None:
        """Delete what retention asks for; errors are logged, and must not end a training."""
        with self._lock, tolerant(f"retention could not go through {self.root}"):
            record = self._current()
            # After going back to an older step, only steps up to the latest count; later ones stay.
            latest = record.latest
            if latest is None:
                return
            written = [s for s in self.committed_steps() if s <= latest and self.wrote(s, record)]
            named = (latest, record.last_verified, *self._also_kept())
            protected = [step for step in named if step is not None]
            due = self._retention.due(written, protected, record.metrics)
            work = [
                (self._remove, step)
                for step in record.steps
                if step < latest and step not in protected and is_leftover(self.folder(step))
            ]
            work += [(self._delete, step) for step in due.delete]
            done = {s for s in due.strip if record.steps[s].stripped} | self._without_optimizer
            work += [(self._strip, step) for step in due.strip if step not in done]
            for method, step in work:
                # The next pass tries again.
                with tolerant(f"retention could not deal with step {step}"):
                    method(step)

    def _current(self, stored: RunRecord | None = None) -> RunRecord:
        """The record, ``stored`` or read, updated with what is committed.

        The stored pointer may be out of date: a process was killed, or a rank lost, between a
        commit and moving the pointer.
        """
        stored = read_record(self.root) if stored is None else stored
        record = RunRecord(stored.latest, dict(stored.steps))
        for step, known in sorted(stored.steps.items()):
            folder = self.folder(step)
            if (known.attempt is not None and known.begun is None) or not is_committed(folder):
                continue
            if known.begun is not None and known.begun == attempt_of(data_folder(folder)):
                record.steps[step] = StepRecord(known.begun, metric=known.metric)
                record.latest = step
            elif known.attempt is None and (record.latest is None or step > record.latest):
                # Recorded by an older version, or saved without a manager: it exists, but no
                # manager of this root may delete it.
                record.latest = step
        return record

    @contextmanager
    def _changing(self, durability: Durability = Durability.PAGE_CACHE) -> Iterator[RunRecord]:
        """Let the body change the record; write it if it is another one or must be durable."""
        with self._lock:
            stored = read_record(self.root)
            record = self._current(stored)
            yield record
            if record != stored or durability is Durability.FSYNC:
                location.make_folder(self.root)
                location.write(self.root / RECORD_NAME, record.to_json(), durability)

    def note(self, step: int, **flags: Any) -> None:
        """Record that a step was verified or stripped, if it is known."""
        with self._changing() as record:
            if step in record.steps:
                record.steps[step] = replace(record.steps[step], **flags)

    def delete(self, step: int) -> None:
        """Delete a checkpoint that a manager of this root wrote.

        Raises:
            CheckpointingException: if no manager of this root wrote it, or if it is the last
                verified one.
        """
        with self._lock:
            record = self._current()
            problem = None
            if not self.wrote(step, record):
                problem = "no manager of this root wrote it"
            elif step == record.last_verified:
                problem = "it is the last checkpoint that is known to be valid"
            if problem is not None:
                finding = Finding(problem, path=str(self.folder(step)), remedy="Delete it by hand.")
                raise CheckpointingException(f"step {step} is not deleted", [finding])
            if record.latest == step:
                latest = max({*self.committed_steps()} - {step}, default=None)
                with self._changing(Durability.FSYNC) as record:
                    record.latest = latest
            self._delete(step)

    def wrote(self, step: int, record: RunRecord | None = None) -> bool:
        """Whether a manager of this root wrote what is in the folder of a step."""
        record = self._current() if record is None else record
        attempt = record.steps.get(step, StepRecord()).attempt
        return attempt is not None and attempt == attempt_of(data_folder(self.folder(step)))

    def _delete(self, step: int) -> None:
        self._remove(step)
        call_hooks(self._on_deleted, step)

    def _remove(self, step: int) -> None:
        if is_there(self.folder(step)):
            remove_checkpoint(self.folder(step))
        with self._changing() as record:
            record.steps.pop(step, None)

    def _strip(self, step: int) -> None:
        folder = self.folder(step)
        prefixes = self._optimizer_prefixes(step)
        # Without tensors to delete, this completes a removal that was interrupted.
        for prefix in prefixes or [_NO_PREFIX]:
            remove_sharded_tensors(folder, prefix, comm=SingleProcess())
        latest = self.latest()
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
