"""The folder of a run, of ours or of Megatron: its steps, and what is known of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from dist_checkpointing.errors import CheckpointNotFoundError, CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.filesystem.folder_lock import LOCK_NAME, holder_of
from dist_checkpointing.filesystem.object_path import Location
from dist_checkpointing.format.commit import is_committed, read_config
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    DCP_METADATA_NAME,
    attempt_of,
)
from dist_checkpointing.format.near_names import hint
from dist_checkpointing.format.seal import Seal, read_seal
from dist_checkpointing.tools.inspect.inventory import Files, count_files

MANAGER_RECORD: Final = "manager.json"
MEGATRON_POINTER: Final = "latest_checkpointed_iteration.txt"
LATEST: Final = "latest"
_NUMBERED: Final = re.compile(r"[A-Za-z_.-]*?(\d+)|release")
_OF_A_RUN: Final = re.compile(r"step-\d{8,}|iter_\d{7,}")
_MAX_POINTER_BYTES: Final = 1 << 10


class StepState(Enum):
    """What the folder of a step is."""

    WHOLE = "whole"
    COMMITTED = "committed"
    SAVING = "being saved"
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"
    FOREIGN = "no checkpoint"

    @property
    def is_checkpoint(self) -> bool:
        """Whether something is committed there."""
        return self in (StepState.WHOLE, StepState.COMMITTED, StepState.DAMAGED)


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of a run.

    Attributes:
        name: Number of the step as text; "release" for a model that Megatron has converted.
        folder: Folder of the step.
        state: State of the folder. WHOLE: all files have the sizes that the save has sealed.
            COMMITTED: the same, but no seal says what the files should be.
        saved_at: Time of the commit (seconds since 1970), or of the begin of the save.
        files: Files of the folder.
        shared_with: Names of the steps that share files with it.
        notes: What the record of the manager says about it.
        inodes: Device, inode and bytes of its files.
    """

    name: str
    folder: Path
    state: StepState
    saved_at: float
    files: Files
    shared_with: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    inodes: frozenset[tuple[int, int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Run:
    """The checkpoints of one run.

    Attributes:
        root: Folder of the run.
        steps: Folders of the steps, oldest first.
        latest: Name of the step that a training goes on from; None if there is none.
        remark: What is wrong with the pointer to it, or None.
    """

    root: Path
    steps: tuple[RunStep, ...]
    latest: str | None
    remark: str | None = None


def located(path: Location) -> Location:
    """The path itself, or of ``run@1000`` and ``run@latest`` the folder of that step.

    Raises:
        CheckpointNotFoundError: if there is no such run or step.
    """
    root_name, at, wanted = path.name.rpartition("@")
    if not at or not isinstance(path, Path) or path.exists():
        return path
    root = path.parent / root_name
    folders = step_folders(root)
    if not folders:
        finding = Finding("no steps of a run are here", path=str(root))
        raise CheckpointNotFoundError(f"{path} does not exist", [finding])
    name = _latest_of(root, folders)[0] if wanted == LATEST else wanted
    found = folders.get(name or "") or folders.get(str(int(wanted)) if wanted.isdecimal() else "")
    if found is None:
        near = hint(wanted, folders) if wanted != LATEST else ""
        problem = "nothing is committed in this run" if wanted == LATEST else f"no such step{near}"
        names = ", ".join(list(folders)[-8:])
        finding = Finding(problem, path=str(root), remedy=f"Its last steps: {names}.")
        raise CheckpointNotFoundError(f"{path} does not exist", [finding])
    return found


def is_run(root: Path) -> bool:
    """Whether a folder is that of a run, which may have no steps yet."""
    return bool(step_folders(root)) or (_is_marked(root) and not is_committed(root))


def read_run(root: Path) -> Run:
    """What is known about each step of a run. Reads no values.

    Raises:
        OSError: if the file system fails.
    """
    folders = step_folders(root)
    latest, remark = _latest_of(root, folders)
    notes = _notes_of(root)
    steps = [look_at(name, folder) for name, folder in folders.items()]
    holders: dict[tuple[int, int, int], list[str]] = {}
    for step in steps:
        for inode in step.inodes:
            holders.setdefault(inode, []).append(step.name)

    def known(step: RunStep) -> RunStep:
        others = {name for inode in step.inodes for name in holders[inode]} - {step.name}
        shared_with = tuple(other.name for other in steps if other.name in others)
        return replace(step, shared_with=shared_with, notes=notes(step))

    return Run(root, tuple(map(known, steps)), latest, remark)


def look_at(name: str, folder: Path) -> RunStep:
    """One step, without what only its run knows: what is shared, and the notes."""
    statuses = local.statuses_below(folder)
    found = statuses.get(CONFIG_FNAME) or statuses.get(DCP_METADATA_NAME)
    begun = found or statuses.get(ATTEMPT_NAME)
    return RunStep(
        name,
        folder,
        state_of(folder, {path: status.st_size for path, status in statuses.items()}),
        begun.st_mtime if begun is not None else folder.stat().st_mtime,
        count_files(folder),
        inodes=frozenset(
            (status.st_dev, status.st_ino, status.st_size)
            for status in statuses.values()
            if status.st_nlink > 1
        ),
    )


def state_of(folder: Path, sizes: dict[str, int]) -> StepState:
    """The state of the folder of a step, whose files have these sizes."""
    try:
        if is_committed(folder):
            read_config(folder)
            seal = read_seal(folder)
            if seal is None or seal.is_open:
                return StepState.COMMITTED
            return StepState.WHOLE if _has_all(seal, sizes) else StepState.DAMAGED
    except CorruptCheckpointError:
        return StepState.DAMAGED
    if LOCK_NAME in sizes and holder_of(folder) is not None:
        return StepState.SAVING
    return StepState.FOREIGN if attempt_of(folder) is None else StepState.UNFINISHED


def _has_all(seal: Seal, sizes: dict[str, int]) -> bool:
    return all(sizes.get(file.name) == file.num_bytes for file in seal.files.values())


def step_folders(root: Path) -> dict[str, Path]:
    """The folders of the steps of a run by name, oldest first; none if it is no run."""
    if not root.is_dir() or is_committed(root) or (root / ATTEMPT_NAME).exists():
        return {}
    found: dict[str, Path] = {}
    # The folders of a manager or of Megatron come first: "backup-3" must not hide their step 3.
    names = [entry.name for entry in root.iterdir()]
    for name in sorted(names, key=lambda name: (_OF_A_RUN.fullmatch(name) is None, name)):
        match = _NUMBERED.fullmatch(name)
        if match is not None and (root / name).is_dir():
            number = name if match[1] is None else str(int(match[1]))
            found[name if number in found else number] = root / name
    if not _is_marked(root) and not any(_may_be_checkpoint(folder) for folder in found.values()):
        return {}
    return dict(sorted(found.items(), key=lambda row: int(row[0]) if row[0].isdecimal() else -1))


def _is_marked(root: Path) -> bool:
    return any((root / name).is_file() for name in (MANAGER_RECORD, MEGATRON_POINTER))


def _may_be_checkpoint(folder: Path) -> bool:
    return is_committed(folder) or (folder / ATTEMPT_NAME).is_file()


def _latest_of(root: Path, folders: dict[str, Path]) -> tuple[str | None, str | None]:
    """Name of the latest step, and what is wrong with the pointer to it."""
    remark = None
    if (root / MANAGER_RECORD).is_file():
        # It brings the pointer up to date after a kill. Not at the top: it imports torch.
        from dist_checkpointing.manager.retention import Retention  # noqa: PLC0415
        from dist_checkpointing.manager.run_folder import RunFolder  # noqa: PLC0415

        latest = RunFolder(root, Retention()).latest()
        return (None if latest is None else str(latest)), None
    with suppress(FileNotFoundError):
        text = local.read_bytes(root / MEGATRON_POINTER, _MAX_POINTER_BYTES)
        named = text.decode(errors="replace").strip()
        named = str(int(named)) if named.isdecimal() else named
        if named in folders and is_committed(folders[named]):
            return named, None
        remark = f"{MEGATRON_POINTER} names {named!r}, which is not a checkpoint here"
    committed = [name for name, folder in folders.items() if is_committed(folder)]
    return (committed[-1] if committed else None), remark


def _notes_of(root: Path) -> Callable[[RunStep], tuple[str, ...]]:
    if not (root / MANAGER_RECORD).is_file():
        return lambda _: ()
    from dist_checkpointing.manager.run_record import read_record  # noqa: PLC0415 - imports torch

    steps = read_record(root).steps

    def notes(step: RunStep) -> Iterator[str]:
        known = steps.get(int(step.name)) if step.name.isdecimal() else None
        if known is not None and known.verified:
            yield "verified"
        if known is not None and known.stripped:
            yield "without optimizer"

    return lambda step: tuple(notes(step))
