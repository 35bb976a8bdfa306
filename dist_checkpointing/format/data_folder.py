"""Where the files of a checkpoint are: in an object store each save has a folder of its own."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from dist_checkpointing.filesystem import local, store
from dist_checkpointing.filesystem.object_path import Location
from dist_checkpointing.filesystem.paths import location
from dist_checkpointing.filesystem.store_claims import COMMITS
from dist_checkpointing.format.leftovers import CONFIG_FNAME

DATA: Final = "data"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}")
_MAX_COMMIT_BYTES: Final = 1 << 20


def data_folder(checkpoint_dir: str | os.PathLike[str]) -> Location:
    """The folder that is laid out like a checkpoint on a disk.

    That is ``data/<attempt>`` of the save that ``.dckpt/commits`` names. Where there are no commits
    it is the folder itself: on a disk, and for a copy of such a folder in a store.

    Raises:
        CorruptCheckpointError: if a commit cannot be read.
        UnsupportedFormatError: for a URL of a scheme that is not known.
        OSError: if the file system or the store does not answer.
    """
    root = location(checkpoint_dir)
    names = (name.removesuffix(".json") for name in store.names_in(root / COMMITS))
    for number in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
        path = root / f"{COMMITS}/{number}.json"
        with local.parsing("a commit cannot be read", path):
            outcome: Any = store.read_json(path, _MAX_COMMIT_BYTES)
            if "attempt" in outcome:  # the others have been ended before they could commit
                if not _ATTEMPT.fullmatch(outcome["attempt"]):
                    raise ValueError(f"{outcome['attempt']!r} is no name of a save")
                # A removal begins with this file, and a commit is complete with it.
                is_complete = store.is_file(root / CONFIG_FNAME)
                return root / DATA / outcome["attempt"] if is_complete else root
    return root
