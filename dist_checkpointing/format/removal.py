"""Tensors on their way out of a checkpoint: what that frees, and what a crash in between leaves.

A format whose index is one file stops naming the tensors in one step. What else there is to delete
is noted before, so that a removal that was cut off is brought to its end by the next one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import make_own_folder
from dist_checkpointing.filesystem.object_store import Location

REMOVAL_NAME = ".dckpt/removal.json"
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PlannedRemoval:
    """What a removal would do, found out without touching anything.

    Attributes:
        keys: Keys of the tensors that go.
        files: Paths relative to the checkpoint of the files that go with them.
        shared: Bytes of removed values that stay on the disk, by the file that they share with
            values that are kept.
        is_unfinished: Whether a removal was cut off here, which another brings to its end.
    """

    keys: tuple[str, ...]
    files: tuple[str, ...]
    shared: Mapping[str, int] = field(default_factory=dict)
    is_unfinished: bool = False


def note_removal(folder: Path, folders: Mapping[str, Iterable[str]]) -> None:
    """Write down, durably, which tensors go, and in which folders their files lie.

    Raises:
        CheckpointExistsError: if there can be no note, because its folder is a link.
    """
    make_own_folder(folder)
    content = {key: list(names) for key, names in folders.items()}
    local_folder.write_atomic(folder / REMOVAL_NAME, json.dumps(content).encode())


def noted_removal(folder: Location) -> dict[str, tuple[str, ...]]:
    """What an unfinished removal has noted; empty without one.

    Raises:
        CorruptCheckpointError: if it cannot be read, or names what is outside of the checkpoint.
    """
    path = folder / REMOVAL_NAME
    data = location.read_own(path, _MAX_BYTES)
    if data is None:
        return {}
    with local_folder.parsing("an unfinished removal cannot be read", path):
        content = local_folder.parse_json(data)
        noted = {str(key): tuple(map(str, names)) for key, names in content.items()}
        for name in (name for names in noted.values() for name in names):
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts:
                raise ValueError(f"{name!r} is no folder of a checkpoint")
    return noted


def end_removal(folder: Path) -> None:
    """Forget what was written down."""
    path = folder / REMOVAL_NAME
    if local_folder.is_there(path):
        local_folder.remove(path, folder)
        local_folder.fsync_folder(path.parent if local_folder.is_folder(path.parent) else folder)
