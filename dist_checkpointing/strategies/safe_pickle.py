"""Writes and reads pickles with an allow-list of classes, so that a file need not be trusted."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import logging
import math
import pathlib
import pickle
import threading
import types
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray as _multiarray

from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.strategies.pickle_guard import BadPickle
from dist_checkpointing.strategies.torch_archive import BadRecord
from dist_checkpointing.strategies.torch_file_guard import check_torch_file

logger: logging.Logger = logging.getLogger(__name__)

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
    bool,
    bytearray,
    bytes,
    complex,
    float,
    int,
    str,
    tuple,
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
    # Plain bytes: extra states of TransformerEngine.
    io.BytesIO,
    # numpy 2 moved these; files have either name.
    *(
        (getattr(_multiarray, name), f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
)
"""The classes and functions that common state and sharded objects may use, in addition to torch's.

They are types of plain data: making one only stores values.
"""

_allow_list = threading.RLock()


@contextmanager
def _safe_globals_allowed(stand_ins: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
    # torch has one allow-list for the process, and removes at the end what is added here: so add
    # nothing that the user has added, and let only one thread at a time do this.
    with _allow_list:
        known = torch.serialization.get_safe_globals()
        ours: list[Any] = [entry for entry in (*SAFE_GLOBALS, *stand_ins) if entry not in known]
        with torch.serialization.safe_globals(ours):
            yield


class PlainPickler(pickle.Pickler):
    """Writes deques and defaultdicts such that ``weights_only`` can read them.

    It does not read pickle's own way, which makes an empty one by a call and then fills it.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if type(obj) is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        return NotImplemented


def pickle_module(pickler: type[pickle.Pickler]) -> Any:
    """A pickle module for ``torch.save`` with another pickler."""
    functions = {"dump": staticmethod(pickle.dump), "dumps": staticmethod(pickle.dumps)}
    return type("pickle", (), {"Pickler": pickler, **functions})


def serialize(value: object, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        InvalidShardingError: if a sharded leaf is inside an object, where it would be lost, or the
            value is nested too deeply.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=pickle_module(PlainPickler))
    except RecursionError:
        finding = Finding(f"{what} is nested too deeply", remedy="Flatten its dicts and lists.")
        raise InvalidShardingError("the state dict cannot be pickled", [finding]) from None
    refused = _refused_globals(buffer)
    try:
        check_torch_file(buffer.getvalue())
    except ValueError as error:
        refused.append(f"a value that every load refuses ({error})")
    hidden = [name for name in refused if name.startswith("dist_checkpointing.mapping")]
    if hidden:
        finding = Finding(
            f"a sharded leaf is inside an object of {what}",
            found=", ".join(hidden),
            remedy="Put it into dicts, lists and tuples: only these are searched.",
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


def deserialize(content: bytes, where: str, *, trusted: bool = False) -> Any:
    """The value that ``torch.save`` wrote as bytes, with its tensors on the CPU.

    Messages say ``where`` they come from. With ``trusted`` the bytes may run any code.

    Raises:
        UnsupportedFormatError: if it needs a class or function that is not on the allow-list.
        CorruptCheckpointError: if the bytes are damaged.
    """
    return _load(io.BytesIO(content), where, trusted=trusted, maps_file=False)


def deserialize_file(
    path: Path,
    *,
    trusted: bool = False,
    maps_file: bool = True,
    stand_ins: Sequence[tuple[Any, str]] = (),
) -> Any:
    """The value in a file of ``torch.save``, with its tensors on the CPU.

    With ``trusted`` the file may run any code; else classes of plain data stand in for those that
    ``stand_ins`` names. A mapped file keeps the values of tensors, and must not change meanwhile;
    files of before PyTorch 1.6 do not allow that.
    """
    return _load(str(path), str(path), trusted=trusted, maps_file=maps_file, stand_ins=stand_ins)


def _load(
    source: io.BytesIO | str,
    where: str,
    *,
    trusted: bool,
    maps_file: bool,
    stand_ins: Sequence[tuple[Any, str]] = (),
) -> Any:
    try:
        if not trusted:
            check_torch_file(Path(source) if isinstance(source, str) else source.getvalue())
        # A sparse tensor with indices out of range would crash the process when it is used.
        checks: Any = torch.sparse.check_sparse_tensor_invariants
        with _safe_globals_allowed(stand_ins), checks():
            value = torch.load(source, map_location="cpu", weights_only=not trusted, mmap=maps_file)
    except BadRecord as error:
        raise _unreadable(str(error), where) from error
    except Exception as error:
        refused = [] if trusted else _refused_globals(source, stand_ins)
        if refused:
            finding = Finding(
                "the file needs classes or functions that are not on the allow-list of plain data",
                found=", ".join(refused),
                path=where,
                remedy="If you trust its source: torch.serialization.add_safe_globals([...]) for "
                "these classes, or trusted=True for everything.",
            )
            raise UnsupportedFormatError("refused to unpickle", [finding]) from error
        problem = str(error) if isinstance(error, BadPickle) else f"{type(error).__name__}: {error}"
        raise _unreadable(problem, where) from error
    if not trusted and _holds_pointers(value):
        finding = Finding(
            "the file holds a numpy array of Python objects, or one with fields outside of it",
            path=where,
            remedy="Save a list instead, or pass trusted=True if you trust its source.",
        )
        raise UnsupportedFormatError("refused to unpickle", [finding])
    return value


def _unreadable(problem: str, where: str) -> CorruptCheckpointError:
    finding = Finding(problem, path=where)
    return CorruptCheckpointError("a file of the checkpoint cannot be read", [finding])


def _holds_pointers(value: Any) -> bool:
    """Whether a numpy array in ``value`` has elements that are Python objects.

    A file can make such an array of any bytes, which numpy would then use as pointers.
    """
    if isinstance(value, np.ndarray):
        return _has_objects(value.dtype)
    if isinstance(value, dict):
        return any(map(_holds_pointers, value)) or any(map(_holds_pointers, value.values()))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return any(map(_holds_pointers, value))
    if isinstance(value, argparse.Namespace | types.SimpleNamespace | io.BytesIO):
        return _holds_pointers(vars(value))
    return False


def _has_objects(dtype: np.dtype[Any]) -> bool:
    # A dtype from a file may contradict its own fields: numpy does not check them.
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return base.itemsize * math.prod(shape) != dtype.itemsize or _has_objects(base)
    fields = [] if dtype.fields is None else list(dtype.fields.values())
    if any(not 0 <= entry[1] <= dtype.itemsize - entry[0].itemsize for entry in fields):
        return True
    return bool(dtype.hasobject) or any(_has_objects(entry[0]) for entry in fields)


def _refused_globals(
    data: io.BytesIO | str, stand_ins: Sequence[tuple[Any, str]] = ()
) -> list[str]:
    try:
        with _safe_globals_allowed(stand_ins):
            if not isinstance(data, str):
                data.seek(0)
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(data))
    except Exception as error:  # noqa: BLE001 - a damaged file may make the parser raise anything
        logger.debug("cannot list the globals of a damaged file: %s", error)
        return []
