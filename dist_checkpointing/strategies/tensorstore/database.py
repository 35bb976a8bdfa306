"""The OCDBT databases of a checkpoint: where they lie, how they are opened and merged.

Every writer fills databases of its own, one a section and lane, and rank 0 merges them by reference
into the one at the root of the checkpoint, which is what readers open.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorstore as ts

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.format.optimizer_keys import is_of_optimizer
from dist_checkpointing.storage.heap import give_back_freed
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.strategies.tensorstore.forks import require_threads

MANIFEST_NAME = "manifest.ocdbt"
NODES_NAME = "d"
DATA_NAME = "data"
CREATED_NAMES = (MANIFEST_NAME, NODES_NAME, DATA_NAME)

DEFAULT_SECTION = "model"
OPTIMIZER_SECTION = "optimizer"
"""An optimizer's tensors lie in data files of their own: dropping a section deletes its files,
whereas deleting keys from a database frees nothing."""

_OS_ERROR = re.compile(r"os_error_code='(\d+)'|\[OS error (\d+)")

_NO_LOCKS = {"file_io_locking": {"mode": "none"}}
"""A database has one writer, under the lock of the folder; some file systems have no other lock."""

CONFIG = {"max_inline_value_bytes": 1024}
"""Of a new database: ``zarr.json`` lies in the tree, so there are half as many values to write."""


MANY_KEYS = 4096
"""From here on what TensorStore has freed after a step is worth giving back to the system."""


def section_of(key: str) -> str:
    """The section that a key belongs to."""
    return OPTIMIZER_SECTION if is_of_optimizer(key) else DEFAULT_SECTION


def section_folder(checkpoint_dir: Path, section: str) -> Path:
    """Where the databases of a section lie."""
    return checkpoint_dir / DATA_NAME / section


def raise_io_error(error: Exception) -> None:
    """Raise the OSError that TensorStore reports as a ValueError, if it is one.

    It says nothing about the contents. A file that is missing does.
    """
    found = _OS_ERROR.search(str(error))
    if found is None:
        return
    code = int(found[1] or found[2])
    if code not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        raise OSError(code, f"{os.strerror(code)} ({error})") from error


@dataclass(frozen=True, slots=True)
class Contents:
    """How much a database holds.

    Attributes:
        num_keys: in it.
        num_bytes: of all values outside the tree itself.
    """

    num_keys: int
    num_bytes: int

    @classmethod
    def total(cls, parts: Iterable[Contents]) -> Contents:
        """Several of them together."""
        rows = list(parts)
        return cls(sum(r.num_keys for r in rows), sum(r.num_bytes for r in rows))


def spec(folder: Path, path: str = "", **settings: Any) -> dict[str, Any]:
    """The key-value store at ``path`` in the database in ``folder``.

    A dict and never a URL: there a ``%20`` in a folder name would silently mean another folder.
    """
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "path": path, **settings}


def make_context(options: StorageOptions, folder: Path) -> Any:
    """The thread pools and caches of one reader or writer."""
    require_threads()
    context: dict[str, Any] = {
        "file_io_concurrency": {"limit": max(64, options.threads)},
        "data_copy_concurrency": {"limit": options.threads},
        # One fsync pass before the commit costs far less than one at each write.
        "file_io_sync": False,
        **_NO_LOCKS,
        # Everything is read once, straight to its destination.
        "cache_pool": {"total_bytes_limit": 0},
    }
    if options.maps_files(folder):
        context["file_io_mode"] = {"mode": "memmap"}
    return ts.Context(context)


def open_store(folder: Path, context: Any, **settings: Any) -> Any:
    """The database in ``folder``."""
    require_threads()
    return ts.KvStore.open(spec(folder, **settings), context=context).result()


def contents(folder: Path) -> Contents:
    """What the newest version of the database in ``folder`` holds, from its manifest alone."""
    require_threads()
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    manifest = ts.ocdbt.dump(base).result()
    statistics = manifest["versions"][-1]["root"]["statistics"]
    return Contents(statistics["num_keys"], statistics["num_indirect_value_bytes"])


def merge(checkpoint_dir: Path, parts: Sequence[tuple[str, Contents]], context: Any) -> None:
    """Make the database at the root of the checkpoint refer to everything in the parts.

    No data is copied, and paths are stored relative to the checkpoint, which may be moved.

    Args:
        checkpoint_dir: an ancestor of all parts; must not have a database yet.
        parts: relative folder of each part, and what it holds.
        context: the same for all of them, or TensorStore cannot copy by reference.

    Raises:
        CorruptCheckpointError: if the result does not hold exactly what the parts hold.
    """
    target = open_store(checkpoint_dir, context, config=CONFIG)
    with ts.Transaction() as transaction:
        merged = target.with_transaction(transaction)
        for name, _ in parts:
            open_store(checkpoint_dir / name, context).experimental_copy_range_to(merged).result()
    expected = Contents.total(held for _, held in parts)
    # Worth a look at the manifest: some versions of TensorStore can lose the values, silently, when
    # a transaction that copies also deletes.
    found = contents(checkpoint_dir) if parts else expected
    if found != expected:
        finding = Finding(
            "the merged database does not hold what the ranks wrote",
            expected=expected,
            found=found,
            path=str(checkpoint_dir / MANIFEST_NAME),
        )
        raise CorruptCheckpointError("merging failed", [finding])
    if found.num_keys >= MANY_KEYS:
        give_back_freed()


def change(checkpoint_dir: Path, dead: Iterable[str], written: Mapping[str, bytes]) -> None:
    """Delete keys and write others, in one transaction."""
    target = open_store(checkpoint_dir, ts.Context(_NO_LOCKS))
    with ts.Transaction() as transaction:
        store = target.with_transaction(transaction)
        pending = [store.write(key, None) for key in dead]
        pending += [store.write(key, value) for key, value in written.items()]
        for write in pending:
            write.result()
