"""The steps of a run, of this library or of Megatron: ``RUN@latest``, and ``dckpt ls RUN``."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.errors import CheckpointNotFoundError, CorruptCheckpointError, Finding, hint
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER
from dist_checkpointing.filesystem.locks import LOCK_NAME, Holder, holder_of
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.filesystem.object_store_locks import CLAIMS, last_known_holder
from dist_checkpointing.format.commit import is_committed, read_commit, read_config
from dist_checkpointing.format.leftovers import (
    ATTEMPT_NAME,
    CONFIG_FNAME,
    DCP_METADATA_NAME,
    attempt_of,
)
from dist_checkpointing.format.seal import read_seal
from dist_checkpointing.threads import in_threads
from dist_checkpointing.tools.report import Report, counted, in_columns, is_narrower_than, painted

CheckpointArgument = Annotated[
    Path,
    Argument(
        parser=location.as_location,
        help="Folder or URL of a checkpoint; RUN@1000 or RUN@latest is a step of a run.",
    ),
]
Trusted = Annotated[
    bool, Option("--trusted", help="Unpickle anything: lets the files run any code.")
]
Memory = Annotated[str, Option(metavar="SIZE", help="Memory that this process may take in all.")]

MANAGER_RECORD: Final = "manager.json"
MEGATRON_POINTER: Final = "latest_checkpointed_iteration.txt"
LATEST: Final = "latest"
_NUMBERED: Final = re.compile(r"[A-Za-z_.-]*?(\d+)|release")
_OF_A_RUN: Final = re.compile(r"step-\d{8,}|iter_\d{7,}")
_MAX_POINTER_BYTES: Final = 1 << 10
_THREADS: Final = 16
_MAX_SHARING_SHOWN: Final = 3
_UNITS: Final[Sequence[tuple[int, str]]] = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
Uses = Mapping[str, location.FileUse]
"""The files of a folder, by relative name."""


@dataclass(frozen=True, slots=True)
class Files:
    """The number of files, and their bytes.

    Attributes:
        num_bytes_on_disk: Bytes of their disk blocks, which are fewer for files with holes.
        num_bytes_shared: Bytes of those that have a name elsewhere, as in other checkpoints.
    """

    num_files: int = 0
    num_bytes: int = 0
    num_bytes_on_disk: int = 0
    num_bytes_shared: int = 0

    @classmethod
    def of(cls, uses: Collection[location.FileUse]) -> Files:
        """What some files take together."""
        return cls(
            len(uses),
            sum(use.num_bytes for use in uses),
            sum(use.num_bytes_stored for use in uses),
            sum(use.num_bytes for use in uses if use.is_shared),
        )

    def own_text(self) -> str:
        """How much of it is shared with nothing else; empty if nothing is shared."""
        if not self.num_bytes_shared:
            return ""
        part, whole = map(bytes_text, (self.num_bytes - self.num_bytes_shared, self.num_bytes))
        return f"{part} of {whole}, the rest is shared with other checkpoints"


def count_files(folder: Location) -> Files:
    """The files below a folder."""
    return Files.of(location.use_below(folder).values())


class StepState(Enum):
    """What the folder of a step is."""

    WHOLE = "whole"  # all files have the sizes that the save has sealed
    COMMITTED = "committed"  # no seal says what the files should be
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
        saved_at: Time of the commit (seconds since 1970), or of the begin of the save.
        begun_at: When the save began, as far as that was noted.
        inodes: Device, inode and bytes of its files.
    """

    name: str
    folder: Location
    state: StepState
    saved_at: float
    files: Files
    begun_at: float | None = None
    inodes: frozenset[tuple[int, int, int]] = frozenset()


def located(path: Location) -> Location:
    """The path itself, or of ``run@1000`` and ``run@latest`` the folder of that step."""
    root_name, at, wanted = path.name.rpartition("@")
    if not at or location.is_there(path):
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


def is_run(root: Location) -> bool:
    """Whether a folder is that of a run, which may have no steps yet."""
    if step_folders(root):
        return True
    is_marked = any(location.is_file(root / name) for name in (MANAGER_RECORD, MEGATRON_POINTER))
    return is_marked and not is_committed(root)


def _uses_of_steps(root: Location, folders: dict[str, Location]) -> dict[str, Uses]:
    """The files of all steps of a run in a store, which are listed at once."""
    if not isinstance(root, ObjectPath):
        return {}
    names = {folder.name: name for name, folder in folders.items()}
    uses: dict[str, dict[str, location.FileUse]] = {name: {} for name in folders}
    for path, use in location.use_below(root).items():
        folder, _, rest = path.partition("/")
        if folder in names:
            uses[names[folder]][rest] = use
    return dict(uses)


def look_at(name: str, folder: Location, uses: Uses | None = None) -> RunStep:
    """One step, in which these files are; without them they are listed."""
    uses = location.use_below(folder) if uses is None else uses
    begun = [path for path in uses if path.endswith(ATTEMPT_NAME)]
    begun_at = max((uses[path].modified for path in begun), default=None)
    commit = uses.get(CONFIG_FNAME) or uses.get(DCP_METADATA_NAME)
    times = [use.modified for use in uses.values()]
    if isinstance(folder, Path):
        times.append(folder.stat().st_mtime)
    return RunStep(
        name,
        folder,
        state_of(folder, uses),
        commit.modified if commit is not None else begun_at or max(times, default=time.time()),
        Files.of(uses.values()),
        begun_at=begun_at,
        inodes=frozenset(
            (*use.inode, use.num_bytes) for use in uses.values() if use.inode is not None
        ),
    )


def state_of(folder: Location, uses: Uses) -> StepState:
    """The state of the folder of a step, in which these files are."""
    try:
        if CONFIG_FNAME in uses or is_committed(folder):
            commit = read_commit(folder)
            if commit is None:
                read_config(folder)
            data = "" if commit is None else f"{commit.data}/"
            seal = read_seal(folder / data)
            if seal is None or seal.is_open:
                return StepState.COMMITTED
            sizes = {name: use.num_bytes for name, use in uses.items()}
            sealed = seal.files.items()
            is_whole = all(sizes.get(data + name) == file.num_bytes for name, file in sealed)
            return StepState.WHOLE if is_whole else StepState.DAMAGED
    except CorruptCheckpointError:
        return StepState.DAMAGED
    if (LOCK_NAME in uses or isinstance(folder, ObjectPath)) and holder_at(folder) is not None:
        return StepState.SAVING
    is_begun = attempt_of(folder) is not None or bool(location.names_in(folder / CLAIMS))
    return StepState.UNFINISHED if is_begun else StepState.FOREIGN


def holder_at(folder: Location) -> Holder | None:
    """Who is saving into a folder; None if nobody seems to, or if that cannot be read."""
    if isinstance(folder, Path):
        return holder_of(folder)
    with suppress(CorruptCheckpointError):
        return last_known_holder(folder)
    return None


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
    is_marked = not {MANAGER_RECORD, MEGATRON_POINTER}.isdisjoint(files)
    if not is_marked and not any(is_committed(step) or _is_begun(step) for step in found.values()):
        return {}
    return dict(sorted(found.items(), key=lambda row: int(row[0]) if row[0].isdecimal() else -1))


def _is_begun(folder: Location) -> bool:
    """Whether a save of this library began there."""
    return location.is_file(folder / ATTEMPT_NAME) or bool(location.names_in(folder / CLAIMS))


def _latest_of(root: Location, folders: dict[str, Location]) -> tuple[str | None, str | None]:
    """Name of the latest step, and what is wrong with the pointer to it."""
    remark = None
    if location.is_file(root / MANAGER_RECORD):
        # It brings the pointer up to date after a kill. Not at the top: it imports torch.
        from dist_checkpointing.manager.retention import Retention  # noqa: PLC0415
        from dist_checkpointing.manager.run_folder import RunFolder  # noqa: PLC0415

        latest = RunFolder(root, Retention()).latest()
        return (None if latest is None else str(latest)), None
    with suppress(FileNotFoundError):
        text = location.read_bytes(root / MEGATRON_POINTER, _MAX_POINTER_BYTES)
        named = text.decode(errors="replace").strip()
        named = str(int(named)) if named.isdecimal() else named
        if named in folders and is_committed(folders[named]):
            return named, None
        remark = f"{MEGATRON_POINTER} names {named!r}, which is not a checkpoint here"
    committed = (name for name in reversed(folders) if is_committed(folders[name]))
    return next(committed, None), remark


def _notes_of(root: Location) -> dict[str, list[str]]:
    """What the record of a manager says about each step, by name."""
    if not location.is_file(root / MANAGER_RECORD):
        return {}
    from dist_checkpointing.manager.run_folder import read_record  # noqa: PLC0415 - imports torch

    return {
        str(number): ["verified"] * known.verified + ["without optimizer"] * known.stripped
        for number, known in read_record(root).steps.items()
    }


# What is printed.


def print_run(root: Location, *, as_json: bool) -> None:
    """Print what is known about the steps of a run, oldest first. Reads no values."""
    folders = step_folders(root)
    latest, remark = _latest_of(root, folders)
    notes = _notes_of(root)
    uses = _uses_of_steps(root, folders)
    steps = in_threads(lambda row: look_at(*row, uses.get(row[0])), list(folders.items()), _THREADS)
    holders: dict[tuple[int, int, int], list[str]] = {}
    for step in steps:
        for inode in step.inodes:
            holders.setdefault(inode, []).append(step.name)
    documents: list[dict[str, Any]] = []
    for step in steps:
        others = {name for inode in step.inodes for name in holders[inode]} - {step.name}
        documents.append(
            {
                "step": step.name,
                "path": str(step.folder),
                "state": step.state.value,
                "saved_at": step.saved_at,
                "num_bytes": step.files.num_bytes,
                "num_bytes_shared": step.files.num_bytes_shared,
                "shared_with": [other.name for other in steps if other.name in others],
                "notes": notes.get(step.name, []),
            }
        )
    report = Report(str(root))
    now = time.time()
    rows = [_cells(document, latest, now) for document in documents]
    headers = ("STEP", "STATE", "AGE", "SIZE", "OWN", "NOTES")
    table = list(in_columns(headers, rows, right=[0, 2, 3, 4]))
    # If they do not fit beside the rest, notes get lines of their own.
    is_narrow = is_narrower_than(max(map(len, table), default=0))
    if is_narrow:
        table = list(in_columns(headers[:-1], [row[:-1] for row in rows], right=[0, 2, 3, 4]))
    report.raw(table[:1])
    for line, row, step in zip(table[1:], rows, steps, strict=True):
        is_fine = step.state in (StepState.WHOLE, StepState.COMMITTED)
        report.raw([painted(line, None if is_fine else "yellow")])
        if is_narrow and row[-1]:
            report.line(f"      {row[-1]}", "dim")
    # A file that several steps share counts once.
    unshared = sum(step.files.num_bytes - step.files.num_bytes_shared for step in steps)
    size = bytes_text(unshared + sum(num_bytes for _, _, num_bytes in holders))
    which = "none is committed" if latest is None else f"latest {latest}"
    report.section()
    report.line(f"{counted(len(steps), 'step')}, {size}, {which}", "bold")
    if remark is not None:
        report.line(remark, "yellow")
    document = {"path": str(root), "latest": latest, "remark": remark, "steps": documents}
    report.finish(document, as_json=as_json)


def _cells(step: dict[str, Any], latest: str | None, now: float) -> tuple[str, ...]:
    notes = ["latest"] * (step["step"] == latest) + step["notes"]
    if nearest := step["shared_with"][::-1]:
        names, more = ", ".join(nearest[:_MAX_SHARING_SHOWN]), len(nearest) - _MAX_SHARING_SHOWN
        notes.append(f"shares with {names}{f' and {more} more' if more > 0 else ''}")
    seconds = max(now - step["saved_at"], 0)
    unit_seconds, unit = next(row for row in _UNITS if seconds >= row[0] or row[1] == "s")
    age = f"{seconds // unit_seconds:.0f} {unit}"
    size = step["num_bytes"]
    sizes = bytes_text(size), bytes_text(size - step["num_bytes_shared"])
    return step["step"], step["state"], age, *sizes, ", ".join(notes)
