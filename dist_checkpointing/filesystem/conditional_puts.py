"""Puts that decide something: at most one of a name, and an answer that is certain."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.filesystem import local
from dist_checkpointing.filesystem.object_path import ObjectPath
from dist_checkpointing.filesystem.object_store import ObjectStore

T = TypeVar("T")

_TRIES: Final = 5
_MAX_BYTES: Final = 1 << 20
_probed: Final[set[ObjectStore]] = set()
"""Buckets that were found to refuse a second put-if-absent of a name."""


def read_object(path: ObjectPath, max_bytes: int = _MAX_BYTES) -> bytes | None:
    """The content of a small object; None if there is none of this name.

    Raises:
        CorruptCheckpointError: if it is larger than ``max_bytes``.
    """
    found = path.store.head(path.key)
    if found is None:
        return None
    local.check_size(found.num_bytes, Path(str(path)), max_bytes)
    try:
        return path.store.get(path.key)
    except FileNotFoundError:
        return None


def put_if_absent(path: ObjectPath, data: bytes) -> bytes:
    """Put an object unless there is one of this name; its content in either case.

    An answer that is lost, or says that the server failed, leaves open whether the object was put:
    the object is read then. So ``data`` must be no other caller's.

    Raises:
        CheckpointingException: if the store does not answer; names the object and the last answer.
        PermissionError: if access is denied.
    """

    def request() -> bytes:
        try:
            path.store.put(path.key, data, create=True)
        except PermissionError:
            raise
        except OSError:
            found = read_object(path)
            if found is None:
                raise
            return found
        return data

    return _in_some_tries(path, request)


def put_surely(path: ObjectPath, data: bytes) -> None:
    """Put an object, and replace one of this name: for what must follow a decision.

    Raises:
        CheckpointingException: if the store does not answer; names the object and the last answer.
        PermissionError: if access is denied.
    """
    _in_some_tries(path, lambda: path.store.put(path.key, data))


def _in_some_tries(path: ObjectPath, request: Callable[[], T]) -> T:
    answer: OSError
    for wait in range(_TRIES):
        try:
            return request()
        except PermissionError:
            raise
        except OSError as error:
            answer = error
        time.sleep(random.uniform(0.5, 1) * 0.1 * 2**wait)  # noqa: S311 - jitter
    finding = Finding(f"the last answer was: {answer.strerror}", path=str(path))
    raise CheckpointingException("an object cannot be put into the store", [finding]) from answer


def require_conditions(folder: ObjectPath) -> None:
    """Refuse a store that replaces an object although it was told to put it only if absent.

    One object is put below the folder and deleted, once for each bucket in a process.

    Raises:
        UnsupportedFormatError: naming the store.
    """
    if folder.store in _probed:
        return
    probe = folder / f".dckpt/probe-{uuid.uuid4().hex}"
    try:
        put_if_absent(probe, b"first")
        has_conditions = put_if_absent(probe, b"second") == read_object(probe) == b"first"
    finally:
        probe.store.delete([probe.key])
    if not has_conditions:
        finding = Finding(
            "a second conditional put of one name was not refused",
            expected="status 412 to If-None-Match: *",
            path=folder.store.url,
            remedy="Save to S3, GCS, Azure, Ceph or another store with conditional puts: in this "
            "one, two saves could mix into one checkpoint.",
        )
        raise UnsupportedFormatError("the store ignores conditional puts", [finding])
    _probed.add(folder.store)
