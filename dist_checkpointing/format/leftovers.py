"""What a failed save or a removal that was cut off left behind, and its cleaning up.

``.dckpt/attempt.json`` names it. Nothing else is deleted, and nothing of it is looked into: it may
be cut off anywhere. A removal notes what there is to delete beside what an index names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Final

import xxhash

from dist_checkpointing.errors import CheckpointExistsError, Finding
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER, Durability, make_dckpt_folder
from dist_checkpointing.filesystem.locks import LOCK_NAME
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import require_file_name

REMOVAL_NAME = ".dckpt/removal.json"
ATTEMPT_NAME = ".dckpt/attempt.json"
CONFIG_FNAME = "metadata.json"
PARTS_NAME = ".dckpt/parts"
"""A name among those of an attempt, and of no file: it writes to disks that not all ranks share."""
DCP_METADATA_NAME = ".metadata"
"""Written last by torch DCP, which knows no ``metadata.json``."""
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PlannedRemoval:
    """What a removal would do: the tensors that go, and their files, relative to the checkpoint.

    ``shared`` are the bytes of removed values that stay on the disk, by the file that they share
    with values that are kept. ``is_unfinished`` says that a removal was cut off here.
    """

    keys: tuple[str, ...]
    files: tuple[str, ...]
    shared: Mapping[str, int] = field(default_factory=dict)
    is_unfinished: bool = False


def note_removal(folder: Path, folders: Mapping[str, Iterable[str]]) -> None:
    """Write down, durably, which tensors go, and in which folders their files lie."""
    make_dckpt_folder(folder)
    content = {key: list(names) for key, names in folders.items()}
    local_folder.write_atomic(folder / REMOVAL_NAME, json.dumps(content).encode())


def noted_removal(folder: Location) -> dict[str, tuple[str, ...]]:
    """What an unfinished removal has noted; empty without one.

    CorruptCheckpointError if it cannot be read, or names what is outside of the checkpoint.
    """
    path = folder / REMOVAL_NAME
    data = location.read_regular(path, _MAX_BYTES)
    if data is None:
        return {}
    with local_folder.parsing("an unfinished removal cannot be read", path):
        content = local_folder.parse_json(data).items()
        noted = {str(key): tuple(map(str, names)) for key, names in content}
        for name in chain.from_iterable(noted.values()):
            require_file_name(name)
    return noted


def _noted(folder: Location) -> tuple[str | None, frozenset[str]]:
    """Name of the last attempt in a folder, and what it was about to create."""
    data = location.read_regular(folder / ATTEMPT_NAME, _MAX_BYTES)
    try:
        content = local_folder.parse_json(data or b"")
        attempt, names = content["attempt"], content["creates"]
        if type(attempt) is not str or {type(names), *map(type, names)} - {list, str}:
            raise TypeError(attempt)
    except (ValueError, KeyError, TypeError):
        # Cut off while it was written, by an older version: it had not created anything yet.
        return None, frozenset()
    return attempt, frozenset(names)


def attempt_json(attempt: str, names: Sequence[str]) -> bytes:
    return local_folder.json_text({"attempt": attempt, "creates": names}).encode()


def note_attempt(folder: Path, attempt: str, names: Sequence[str], durability: Durability) -> None:
    # As a whole: names that are lost would be files that nobody deletes.
    local_folder.write_content(folder, ATTEMPT_NAME, attempt_json(attempt, names), durability)


def leftovers(folder: Location) -> frozenset[str]:
    """What the last save into a folder, committed or not, was about to create in it.

    CorruptCheckpointError if that is outside of the folder.
    """
    names = _noted(folder)[1]
    message = "a leftover attempt cannot be cleared away"
    with local_folder.parsing(message, folder / ATTEMPT_NAME):
        for name in names:
            require_file_name(name)
            if PurePosixPath(name).as_posix() in (".dckpt", ATTEMPT_NAME, LOCK_NAME):
                raise ValueError(f"{name!r} is not what a save creates")
    return names


def attempt_of(folder: Location) -> str | None:
    """Name of the last save into a folder; None if this library made none there."""
    return _noted(folder)[0]


def number_of_save(folder: Location) -> int:
    """A number that tells the saves into one folder apart; 0 if this library made none there."""
    start = location.read_regular(folder / ATTEMPT_NAME, _START_BYTES, is_start=True)
    return 0 if start is None else xxhash.xxh3_64_intdigest(start) >> 2


def is_in_attempt(folder: Location, attempt: str) -> bool:
    """Whether the last save that began in a folder is this one."""
    start = _START % attempt.encode()
    return location.read_regular(folder / ATTEMPT_NAME, len(start), is_start=True) == start


_START: Final = b'{"attempt":"%s"'
_START_BYTES: Final = len(_START % (b"0" * 32))


def clear(folder: Path, names: Iterable[str]) -> None:
    """Delete what an attempt created, and what speaks of it."""
    clear_temporaries(folder)
    location.remove_all(sorted({*names, REMOVAL_NAME}), folder)


def clear_temporaries(folder: Path) -> None:
    """Delete what saves and removals left that were killed while they wrote a file.

    For a process that has the lock of the folder.
    """
    names = {*leftovers(folder), ATTEMPT_NAME, REMOVAL_NAME, DCP_METADATA_NAME}
    location.remove_temporaries(names, folder)


def refuse_foreign(
    folder: Path, names: Iterable[str], left: frozenset[str], there: set[str]
) -> None:
    """Refuse to write over what no save of ours made; ``there`` are the names in the folder."""
    if there <= {DCKPT_FOLDER, LOCK_NAME}:
        names = [n for n in names if DCKPT_FOLDER in there and n.startswith(f"{DCKPT_FOLDER}/")]
    foreign = {n for n in names if n not in left and location.is_there(folder / n)}
    # What is written below a link would lie outside of the checkpoint.
    above = location.folders_of(names) - left
    links = {name for name in above if (folder / name).is_symlink()}
    findings = [
        Finding(
            f"{'is a link' if name in links else 'exists'}, and no unfinished save of ours made it",
            path=str(folder / name),
            remedy="Save into an empty folder.",
        )
        for name in sorted(foreign - {CONFIG_FNAME} | links)
    ]
    CheckpointExistsError.raise_if(findings, f"{folder} is not empty")


def is_spent(folder: Path) -> bool:
    """Whether nothing is left of a checkpoint but what a removal deletes last, if that."""
    names = {*location.names_in(folder), *location.names_in(folder / DCKPT_FOLDER)}
    return names <= {DCKPT_FOLDER, LOCK_NAME}
