"""("torch", 1): the common state in ``common.pt``, sharded objects as ``KEY/shard_*.pt``.

Files are read with ``weights_only=True`` and an allow-list; a checkpoint never runs code.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import logging
import pathlib
import threading
import types
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray as _multiarray

from dist_checkpointing import store
from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from dist_checkpointing.strategies.base import LoadCommonStrategy, SaveCommonStrategy
from dist_checkpointing.tree import flatten, unflatten

logger = logging.getLogger(__name__)

COMMON_STATE_FNAME = "common.pt"
_MAX_COMMON_BYTES = 1 << 38

SAFE_GLOBALS: tuple[Any, ...] = (
    argparse.Namespace,
    types.SimpleNamespace,
    collections.deque,
    collections.defaultdict,
    collections.Counter,
    collections.OrderedDict,
    dict,
    list,
    set,
    frozenset,
    slice,
    range,
    bytearray,
    complex,
    dt.date,
    dt.datetime,
    dt.time,
    dt.timedelta,
    dt.timezone,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    uuid.SafeUUID,
    pathlib.Path,
    pathlib.PosixPath,
    pathlib.PurePath,
    pathlib.PurePosixPath,
    torch.Size,
    torch.device,
    torch.dtype,
    np.dtype,
    np.ndarray,
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    # numpy moved these between 1.x and 2.x, and files know them by either name.
    *(
        (getattr(_multiarray, name), f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
)
"""Everything that common state and sharded objects may hold beside what torch itself allows.

Types of plain data only: none of them does anything but hold values when it is made.
"""

_allow_list = threading.RLock()


@contextmanager
def _safe_globals_allowed() -> Iterator[None]:
    # torch keeps one allow-list a process, and takes everything off it again at the end: leave what
    # the user added alone, and let no two threads interleave.
    with _allow_list:
        known = torch.serialization.get_safe_globals()
        ours: list[Any] = [entry for entry in SAFE_GLOBALS if entry not in known]
        with torch.serialization.safe_globals(ours):
            yield


def serialize(value: object, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Args:
        value: anything that pickles.
        what: how to call it in messages.

    Raises:
        InvalidShardingError: if a sharded leaf hides in it, where it would be lost.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    refused = _refused_globals(buffer)
    hidden = [name for name in refused if name.startswith("dist_checkpointing.mapping")]
    if hidden:
        finding = Finding(
            f"a sharded leaf hides inside an object of {what}",
            found=", ".join(hidden),
            remedy="Put it into dicts, lists and tuples, which are searched.",
        )
        raise InvalidShardingError("a sharded leaf would be lost", [finding])
    if refused:
        logger.warning(
            "%s holds %s, which can only be read back with trusted=True "
            "(or after torch.serialization.add_safe_globals)",
            what,
            ", ".join(refused),
        )
    return buffer.getvalue()


def deserialize(path: Path, *, trusted: bool = False) -> Any:
    """The object that a ``.pt`` file holds, tensors on the CPU.

    Raises:
        UnsupportedFormatError: if it needs a class or function that is not on the allow-list.
        CorruptCheckpointError: if the file is damaged.
    """
    data = io.BytesIO(store.read_bytes(path, _MAX_COMMON_BYTES))
    try:
        with _safe_globals_allowed():
            return torch.load(data, map_location="cpu", weights_only=not trusted)
    except Exception as error:
        refused = [] if trusted else _refused_globals(data)
        if refused:
            finding = Finding(
                "the file wants to use what is not on the allow-list of plain data types",
                found=", ".join(refused),
                path=str(path),
                remedy="If you trust its source: torch.serialization.add_safe_globals([...]) for "
                "these classes, or trusted=True for everything.",
            )
            raise UnsupportedFormatError("refused to unpickle", [finding]) from error
        finding = Finding(f"{type(error).__name__}: {error}", path=str(path))
        raise CorruptCheckpointError(
            "a file of the checkpoint cannot be read", [finding]
        ) from error


def _refused_globals(data: io.BytesIO) -> list[str]:
    try:
        with _safe_globals_allowed():
            data.seek(0)
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes the parser raise
        logger.debug("cannot list the globals of a damaged file: %s", error)
        return []


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes ``common.pt`` and one ``.pt`` file a sharded object."""

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def created_names(self, object_keys: Iterable[str]) -> Iterable[str]:
        keys = list(object_keys)
        for key in keys:
            store.check_raw_key(key)
        return [COMMON_STATE_FNAME, *keys]

    def save_common(
        self, common_state_dict: StateDict, checkpoint_dir: str | PathLike[str]
    ) -> None:
        data = serialize(common_state_dict, "the common state")
        store.write_atomic(Path(checkpoint_dir) / COMMON_STATE_FNAME, data)

    def save_sharded_objects(
        self,
        sharded_objects_state_dict: ShardedStateDict,
        checkpoint_dir: str | PathLike[str],
    ) -> None:
        root = Path(checkpoint_dir)
        leaves, _ = flatten(sharded_objects_state_dict)
        files = []
        for leaf in leaves.values():
            if is_main_replica(leaf.replica_id):
                path = root / f"{leaf.unique_key}.pt"
                path.parent.mkdir(parents=True, exist_ok=True)
                store.write_atomic(path, serialize(leaf.data, f"the ShardedObject {leaf.key!r}"))
                files.append(path)
        store.fsync_folders(files, root)


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Reads what TorchCommonSaveStrategy and every Megatron release with a ``common.pt`` wrote.

    Args:
        trusted: unpickle anything, which lets the files run any code.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self.trusted = trusted

    def trusting(self) -> TorchCommonLoadStrategy:
        return TorchCommonLoadStrategy(trusted=True)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "torch":
            finding = Finding("unknown common backend", expected="torch", found=loaded_backend)
            raise UnsupportedFormatError("cannot read the common state", [finding])

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            finding = Finding("unknown version", expected="torch 1", found=loaded_version)
            raise UnsupportedFormatError("cannot read the common state", [finding])

    def load_common(self, checkpoint_dir: str | PathLike[str]) -> StateDict:
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        if not path.is_file():
            finding = Finding("missing", path=str(path), remedy="Use another checkpoint.")
            raise CorruptCheckpointError(f"Common file {path} does not exist", [finding])
        common = deserialize(path, trusted=self.trusted)
        if not isinstance(common, dict):
            finding = Finding("not a dict", found=type(common).__name__, path=str(path))
            raise CorruptCheckpointError("the common state is damaged", [finding])
        return common

    def load_sharded_objects(
        self,
        sharded_objects_state_dict: ShardedStateDict,
        checkpoint_dir: str | PathLike[str],
    ) -> StateDict:
        leaves, skeleton = flatten(sharded_objects_state_dict)
        values = {
            path: self._load_object(leaf, Path(checkpoint_dir)) for path, leaf in leaves.items()
        }
        result: StateDict = unflatten(skeleton, values)
        return result

    def _load_object(self, leaf: ShardedObject, root: Path) -> Any:
        store.check_raw_key(leaf.key)
        path = root / f"{leaf.unique_key}.pt"
        if not path.is_file():
            # Writers of old lost the last extent, taking it for a file suffix.
            path = (
                root / f"{leaf.unique_key}.pt".replace(f".{leaf.global_shape[-1]}.pt", ".pt")
                if leaf.global_shape
                else path
            )
        if not path.is_file():
            finding = Finding("not in the checkpoint", leaf.unique_key, path=str(path))
            raise StateMismatchError(f"Object shard {path} not found", [finding])
        return deserialize(path, trusted=self.trusted)

    def load_sharded_metadata(self, checkpoint_dir: str | PathLike[str]) -> ShardedStateDict:
        root = Path(checkpoint_dir)
        found = [
            ShardedObject.empty_from_unique_key(path.relative_to(root).with_suffix("").as_posix())
            for path in sorted(root.rglob("shard_*.pt"))
            if path.parent != root
        ]
        last: dict[str, int] = {}
        for leaf in found:
            if leaf.global_offset:
                last[leaf.key] = max(last.get(leaf.key, 0), leaf.global_offset[-1] + 1)
        for leaf in found:
            if leaf.global_shape and leaf.global_shape[-1] == -1:
                leaf.global_shape = (*leaf.global_shape[:-1], last[leaf.key])
        return {leaf.unique_key: leaf for leaf in found}
