"""The steps of a run: its record, and which of them ``RUN@1000`` and ``RUN@latest`` name.

A run is of this library or of Megatron.
"""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import xxhash

from dist_checkpointing.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    UnsupportedFormatError,
    hint,
)
from dist_checkpointing.filesystem import file_writer, local_folder, location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER
from dist_checkpointing.filesystem.location import is_there
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.filesystem.object_store_locks import CLAIMS, put_surely
from dist_checkpointing.format.commit import (
    check_is_distributed_checkpoint,
    data_folder,
    is_committed,
)
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    DCP_METADATA_NAME,
    attempt_of,
)

logger: logging.Logger = logging.getLogger(__name__)
RECORD_NAME: Final = "manager.json"
_FORMAT: Final = 1
_NO_FILE: Final = "create"
_MAX_BYTES: Final = 1 << 26
STEP_FOLDER: Final = re.compile(r"step-(\d+)")
MEGATRON_POINTER: Final = "latest_checkpointed_iteration.txt"
LATEST: Final = "latest"
_CLAIM: Final = re.compile(rf"{re.escape(RECORD_NAME)}\.(create|[0-9a-f]{{32}})(\.[0-9a-f]{{32}})?")
_NUMBERED: Final = re.compile(r"[A-Za-z_.-]*?(\d+)|release")
_OF_A_RUN: Final = re.compile(r"step-\d{8,}|iter_\d{7,}")
_PLAIN: Final = re.compile(rf"\d+|{_OF_A_RUN.pattern}")
_MAX_POINTER_BYTES: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known about one step.

    Attributes:
        attempt: Name of the save that committed it; None if none has.
        verified: Whether all of it has been read back and compared.
        stripped: Whether its optimizer state has been deleted.
        metric: Metric that was passed to its save.
        parent: The step that it grew from: the one that was loaded or saved last when its save
            began. NO_STEP if it grew from none; None in records of older versions: the next lower
            step.
        begun: Name of the save that claimed its folder after that, and is not known to have
            committed; with its metric and its parent.
    """

    attempt: str | None = None
    verified: bool = False
    stripped: bool = False
    begun: str | None = None
    metric: float | None = None
    parent: int | None = None
    begun_metric: float | None = None
    begun_parent: int | None = None


NO_STEP: Final = -1
"""Number of the step that the first step grows from."""
_KINDS: Final = get_type_hints(StepRecord)


@dataclass(slots=True)
class RunRecord:
    """The pointer, and what is known about every step that the manager has begun to write.

    ``latest`` is the step that was last committed, durably, before this was written; ``writer``
    says which manager began or committed the last save, and when; ``version`` is that of the file
    that was read, if there was one.
    """

    latest: int | None = None
    steps: dict[int, StepRecord] = field(default_factory=dict)
    writer: str = ""
    version: Any = field(default=_NO_FILE, compare=False)

    def to_json(self) -> bytes:
        steps = {
            # Older versions do not know the others, and expect these.
            str(step): {
                name: value
                for name, value in asdict(known).items()
                if value is not None or name == "attempt"
            }
            for step, known in sorted(self.steps.items())
        }
        content = {"format": _FORMAT, "latest": self.latest, "steps": steps, "writer": self.writer}
        # No two records are equal: what follows on one must not follow on another.
        return json.dumps(content | {"nonce": os.urandom(8).hex()}).encode()

    @property
    def metrics(self) -> dict[int, float]:
        return {s: r.metric for s, r in self.steps.items() if r.metric is not None}

    def history(self, steps: Iterable[int], newest: int | None = None) -> list[int]:
        """Those of some steps that ``newest`` has grown from, and itself; newest first.

        By default that is the latest step; all steps if nothing says which is the latest. A step
        that no manager wrote belongs to the history if it has a lower number.
        """
        newest = self.latest if newest is None else newest
        if newest is None:
            return sorted(steps, reverse=True)
        step, written = newest, self._written
        others = set(written)
        while step != NO_STEP:
            others.discard(step)
            step = self._parent(step, written)
        return sorted({s for s in steps if s <= newest} - others, reverse=True)

    @property
    def _written(self) -> list[int]:
        return sorted(step for step, known in self.steps.items() if known.attempt is not None)

    def _parent(self, step: int, written: list[int]) -> int:
        """The step that one has grown from; the next lower one if that is not known any more."""
        known = self.steps.get(step)
        parent = None if known is None else known.parent
        if parent == NO_STEP or (parent in self.steps and parent < step):
            return parent
        lower = bisect_left(written, step if parent is None else min(step, parent))
        return written[lower - 1] if lower else NO_STEP

    @property
    def abandoned(self) -> set[int]:
        """The steps that a manager wrote, and that the latest one has not grown from."""
        return set(self._written).difference(self.history(self.steps))

    def has_abandoned(self, steps: Iterable[int], other: RunRecord) -> bool:
        """Whether the first of another record's steps that is known here is of an abandoned branch.

        A step is known from the same save alone.
        """
        known = self.steps
        saves = (s for s in steps if s in known and known[s].attempt == other.steps[s].attempt)
        return next(saves, None) in self.abandoned

    @property
    def last_verified(self) -> int | None:
        """The newest step of the history that was verified and has its optimizer state."""
        known = self.steps
        steps = (s for s in self.history(known) if known[s].verified and not known[s].stripped)
        return next(steps, None)

    def commit(self, step: int, known: StepRecord, *, is_latest: bool = True) -> None:
        """Make a step the latest one, or put it in its place in the history; what has grown from
        another save of it stays with that.
        """
        self.forget(step)
        newer = [] if is_latest else [s for s in self.history(self.steps) if s > step]
        if newer:
            self.steps[newer[-1]] = replace(self.steps[newer[-1]], parent=step)
        else:
            self.latest = step
        self.steps[step] = known

    def forget(self, step: int) -> None:
        """Remove a step; what has grown from it has now grown from what it has grown from."""
        parent = self._parent(step, self._written)
        for child, known in self.steps.items():
            if known.parent == step:
                self.steps[child] = replace(known, parent=parent)
        self.steps.pop(step, None)
        if self.latest == step:
            # What is left then was abandoned, and must not come back.
            self.latest = parent if parent != NO_STEP or self._written else None


def read_record(root: Location) -> RunRecord:
    """The record of a folder; an empty one if it is missing or cannot be parsed.

    It is safe to lose the record: a manager deletes only what its record names. OSError if the file
    system fails.
    """
    path, version = root / RECORD_NAME, _NO_FILE
    try:
        with local_folder.parsing("it cannot be read and is not used", path):
            if isinstance(path, ObjectPath):
                content, version = path.store.get_version(path.key, _MAX_BYTES)
            else:
                content = location.read_bytes(path, _MAX_BYTES)
                version = xxhash.xxh3_128_hexdigest(content)
            return _parsed(local_folder.parse_json(content), version)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except CorruptCheckpointError as error:
        logger.warning("%s", error)
    return RunRecord(version=version)


def write_record(root: Location, record: RunRecord) -> bool:
    """Write a record, if the one of its version is there still; whether this process has done it.

    On a disk there is no lock, which a stopped process would have. Each writer has a file with a
    name of its own. What follows on a version is the one that has a second name, the claim, which
    one writer alone can give. Any process renames the file to put the record in place, which can be
    done only once, however late: a claim of a version that has passed means nothing.
    """
    path, data, version = root / RECORD_NAME, record.to_json(), record.version
    if isinstance(path, ObjectPath):
        try:
            return put_surely(path, data, version) == data
        except UnsupportedFormatError:  # the store does not compare versions
            path.store.put(path.key, data)
            return True
    local_folder.make_durable_folder(path.parent)
    claim = path.with_name(f"{path.name}.{version}")
    own, is_written = _file_of(claim, data), False
    file_writer.put(path.parent, own.name, data, local_folder.Durability.FSYNC)
    with suppress(FileExistsError, FileNotFoundError):  # another process was faster
        if version == _NO_FILE:
            local_folder.rename_new(own, path)
            return True
        chosen = own
        try:
            local_folder.link_new(own, claim)
        except FileExistsError:
            chosen = _file_of(claim, location.read_bytes(claim, _MAX_BYTES))
        if read_record(root).version == version:
            try:
                chosen.replace(path)
                is_written = chosen == own
            except FileNotFoundError:
                if read_record(root).version == version:  # older libraries have no such file
                    claim.replace(path)
        claim.unlink()
    own.unlink(missing_ok=True)
    return is_written


def _file_of(claim: Path, data: bytes) -> Path:
    """The file of the writer that has given it the name of the claim as well."""
    return claim.with_name(f"{claim.name}.{xxhash.xxh3_128_hexdigest(data)}")


def remove_old_claims(root: Location) -> None:
    """Delete what killed writers of a record have left, but not what follows on the record."""
    if isinstance(root, ObjectPath):
        return
    location.remove_temporaries([RECORD_NAME], root)
    names = location.names_in(root)  # before the version, so those of others are of past ones
    version = read_record(root).version
    for match in map(_CLAIM.fullmatch, names) if version != _NO_FILE else ():
        if match is not None and match[1] != version:
            local_folder.remove(root / match[0], root)


def _parsed(content: Any, version: Any) -> RunRecord:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}")
    steps = {
        int(step): StepRecord(**{name: known[name] for name in _KINDS if name in known})
        for step, known in content["steps"].items()
    }
    latest = content["latest"]
    if type(latest) not in (int, NoneType):
        raise ValueError(f"latest is {latest!r}")
    for record in steps.values():
        if not all(fits(getattr(record, name), kind) for name, kind in _KINDS.items()):
            raise ValueError(f"{record!r}")
    return RunRecord(latest, steps, str(content.get("writer", "")), version)


@cache
def _origin_and_arguments(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; a bool is no number, and an int may be a float."""
    origin, parts = _origin_and_arguments(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is Sequence:
        return isinstance(value, Sequence) and all(fits(item, parts[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (float, int) if kind is float else origin or kind)


def step_folder(root: Any, step: int) -> Any:
    """Folder of a step of a manager, whether or not it exists."""
    return root / f"step-{step:08d}"


def steps_of_manager(root: Location) -> list[int]:
    """Every step that has a folder of a manager, newest first."""
    matches = map(STEP_FOLDER.fullmatch, location.folders_and_files(root)[0])
    return sorted({int(match[1]) for match in matches if match}, reverse=True)


def up_to_date(
    root: Location,
    stored: RunRecord,
    own_saves: Container[str | None] = (),
    own_step: int | None = None,
) -> RunRecord:
    """A record as it was read, updated with what is committed.

    The stored pointer may be out of date: a process was killed, or a rank lost, between a
    commit and moving the pointer. A step that its own save is writing is not looked at.
    """
    record = replace(stored, steps=dict(stored.steps))
    for step, known in sorted(stored.steps.items()):
        folder = step_folder(root, step)
        is_own = step == own_step and known.begun in own_saves
        is_settled = is_own or (known.attempt is not None and known.begun is None)
        if is_settled or not is_committed(folder):
            continue
        if known.begun is not None and known.begun == attempt_of(data_folder(folder)):
            parent = known.begun_parent
            # An older version has no parent, and the metric in the place of that of a commit.
            metric = known.metric if parent is None else known.begun_metric
            record.commit(step, StepRecord(known.begun, metric=metric, parent=parent))
        elif known.attempt is None and (record.latest is None or step > record.latest):
            # Recorded by an older version, or saved without a manager: it exists, but no
            # manager of this root may delete it.
            record.latest = step
    return record


def latest_step(root: Location) -> int | None:
    """The newest committed step of the history: the last one that was committed."""
    record = up_to_date(root, read_record(root))
    pointer = record.latest
    if pointer is not None and check_is_distributed_checkpoint(step_folder(root, pointer)):
        return pointer
    steps = record.history(steps_of_manager(root))
    return next((s for s in steps if check_is_distributed_checkpoint(step_folder(root, s))), None)


def step_folders(root: Location) -> dict[str, Location]:
    """The folders of the steps of a run by name, oldest first; none if it is no run."""
    folders, files = location.folders_and_files(root)
    found: dict[str, Location] = {}
    # The folders of a manager or of Megatron come first: "backup-3" must not hide their step 3.
    for name in sorted(folders, key=lambda name: (_OF_A_RUN.fullmatch(name) is None, name)):
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            number = name if match[1] is None else str(int(match[1]))
            found[name if number in found else number] = root / name
    is_checkpoint = {DCKPT_FOLDER, CONFIG_FNAME, DCP_METADATA_NAME} & {*folders, *files}
    if is_checkpoint and (is_committed(root) or _is_begun(root)):
        return {}
    is_marked = not {RECORD_NAME, MEGATRON_POINTER}.isdisjoint(files)
    if not is_marked and not any(is_committed(step) or _is_begun(step) for step in found.values()):
        return {}
    # Beside checkpoints with other names, the 4 of "again-4" may be the number of anything.
    named = [root / name for name in folders if not (is_marked or _NUMBERED.fullmatch(name))]
    if others := [step for step in named if is_committed(step)]:
        plain = {key: step for key, step in found.items() if _PLAIN.fullmatch(step.name)}
        found = plain or {step.name: step for step in (*found.values(), *others)}
    return dict(sorted(found.items(), key=lambda row: int(row[0]) if row[0].isdecimal() else -1))


def _is_begun(folder: Location) -> bool:
    return location.is_file(folder / ATTEMPT_NAME) or bool(location.names_in(folder / CLAIMS))


def latest_of(root: Location, folders: dict[str, Location]) -> tuple[str | None, str | None]:
    """Name of the latest step, and what is wrong with the pointer to it."""
    remark = None
    if location.is_file(root / RECORD_NAME):
        latest = latest_step(root)
        return (None if latest is None else str(latest)), None
    with suppress(FileNotFoundError):
        text = location.read_bytes(root / MEGATRON_POINTER, _MAX_POINTER_BYTES)
        named = text.decode(errors="replace").strip()
        named = str(int(named)) if named.isdecimal() else named
        if named in folders and is_committed(folders[named]):
            return named, None
        remark = f"{MEGATRON_POINTER} names {named!r}, which is not a checkpoint here"
    numbered = (name for name in reversed(folders) if name.isdecimal() or name == "release")
    committed = (name for name in numbered if is_committed(folders[name]))
    return next(committed, None), remark


def is_run(root: Location) -> bool:
    """Whether a folder is that of a run, which may have no steps yet."""
    if step_folders(root):
        return True
    is_marked = any(location.is_file(root / name) for name in (RECORD_NAME, MEGATRON_POINTER))
    return is_marked and not is_committed(root)


def located(path: Location) -> Location:
    """The path itself, or of ``run@1000`` and ``run@latest`` the folder of that step."""
    root_name, at, wanted = path.name.rpartition("@")
    if not at or is_there(path):
        return path
    root = path.parent / root_name
    folders = step_folders(root)
    if not folders:
        finding = Finding("no steps of a run are here", path=str(root))
        raise CheckpointNotFoundError(f"{path} does not exist", [finding])
    if wanted == LATEST:
        name, problem = latest_of(root, folders)[0], "nothing is committed in this run"
    else:
        number = str(int(wanted)) if wanted.isdecimal() else ""
        name = wanted if wanted in folders else number
        problem = f"no such step{hint(wanted, folders)}"
    if name not in folders:
        remedy = f"Its last steps: {', '.join(list(folders)[-8:])}."
        finding = Finding(problem, path=str(root), remedy=remedy)
        raise CheckpointNotFoundError(f"{path} does not exist", [finding])
    return folders[name]
