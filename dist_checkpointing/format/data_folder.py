"""Where the files of a checkpoint are: in an object store each save has a folder of its own."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Any, Final

from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.object_store_locks import COMMITS
from dist_checkpointing.format.commit import CheckpointingConfig
from dist_checkpointing.format.leftovers import CONFIG_FNAME

DATA: Final = "data"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")
_MAX_COMMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Commit:
    """A save that has committed in an object store.

    Attributes:
        number: Number of its claim; the commit with the highest one is the checkpoint.
        attempt: Name of the save. Its files lie below ``data/<attempt>/``.
        config: What ``metadata.json`` says.
        seal: Checksum that the seal of the save begins with; "" without a seal.
    """

    number: int
    attempt: str
    config: CheckpointingConfig
    seal: str

    @property
    def data(self) -> str:
        """Name of the folder of its files, below the place of the checkpoint."""
        return f"{DATA}/{self.attempt}"


def read_commit(folder: Location) -> Commit | None:
    """The last save that has committed here; None if there is none, and on a disk.

    Readers also need ``metadata.json``: it goes first when a checkpoint is removed.

    Raises:
        CorruptCheckpointError: if a commit cannot be read.
        OSError: if the store does not answer.
    """
    names = (name.removesuffix(".json") for name in location.names_in(folder / COMMITS))
    for number in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
        path = folder / f"{COMMITS}/{number}.json"
        data = location.read_own(path, _MAX_COMMIT_BYTES)
        if data is None:
            continue  # removed meanwhile
        with local_folder.parsing("a commit cannot be read", path):
            outcome: Any = local_folder.parse_json(data)
            if "attempt" in outcome:  # the others have been ended before they could commit
                if not _ATTEMPT.fullmatch(outcome["attempt"]):
                    raise ValueError(f"{outcome['attempt']!r} is no name of a save")
                known = {field.name for field in fields(CheckpointingConfig)}
                config = {k: v for k, v in outcome["config"].items() if k in known}
                return Commit(
                    number,
                    outcome["attempt"],
                    CheckpointingConfig(**config),
                    str(outcome["seal"]),
                )
    return None


def data_folder(checkpoint_dir: str | os.PathLike[str]) -> Location:
    """The folder that is laid out like a checkpoint on a disk.

    That is ``data/<attempt>`` of the save that ``.dckpt/commits`` names. Where there are no commits
    it is the folder itself: on a disk, and for a copy of such a folder in a store.

    Raises:
        CorruptCheckpointError: if a commit cannot be read.
        UnsupportedFormatError: for a URL of a scheme that is not known.
        OSError: if the file system or the store does not answer.
    """
    root = as_location(checkpoint_dir)
    commit = read_commit(root)
    # A removal begins with this file, and a commit is complete with it.
    is_complete = commit is not None and location.is_file(root / CONFIG_FNAME)
    return root / commit.data if commit is not None and is_complete else root
