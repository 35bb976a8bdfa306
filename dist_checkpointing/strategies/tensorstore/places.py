"""Where the database of a checkpoint keeps values, remembered for as long as it does not change."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from dist_checkpointing.filesystem import store
from dist_checkpointing.filesystem.object_path import Location
from dist_checkpointing.format.ocdbt.manifest import MANIFEST_NAME
from dist_checkpointing.format.ocdbt.tree_reader import Tree, Values

_NAMES: Final = (MANIFEST_NAME,)


class Places:
    """Finds values in the newest version of a database; several threads may ask.

    What lies in the folder of another save, the caller notices.
    """

    def __init__(self, checkpoint_dir: Location) -> None:
        self._folder = checkpoint_dir
        self._version: object = None
        self._tree: Tree | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Places], tuple[Location]]:
        # A copy in another process finds out for itself.
        return Places, (self._folder,)

    @property
    def are_known(self) -> bool:
        return self._tree is not None

    def find(self, keys: Sequence[bytes], *, keeps_nodes: bool) -> Values:
        """Where values are. With ``keeps_nodes`` the tree is remembered for the next call.

        Raises:
            CorruptCheckpointError: if the database cannot be read, or points out of the checkpoint.
        """
        return self._newest(keeps_nodes=keeps_nodes).find(keys)

    def find_outside(self, key: bytes, *, keeps_nodes: bool) -> tuple[str, int, int] | None:
        """File, first byte and length of one value; None if it is absent or in the tree itself."""
        return self._newest(keeps_nodes=keeps_nodes).find_outside(key)

    def _newest(self, *, keeps_nodes: bool) -> Tree:
        if not keeps_nodes:
            return Tree(self._folder)
        with self._lock:
            # Every change puts a new manifest in its place; an object of a save stays as it is.
            version = store.marks_of(self._folder, _NAMES, opens=False)
            if self._tree is None or version != self._version:
                self._tree, self._version = Tree(self._folder, keeps_nodes=True), version
            return self._tree
