"""Writes and reads pickles with an allow-list of classes, so that a file need not be trusted.

What a load would refuse is refused before it is saved. Most of a common state is plain data,
recognised by type. Other values are pickled, without the values of their tensors, and read back.
"""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy._core import multiarray as _multiarray

from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.format.foreign_formats import OLD_TORCH_SIGNATURE
from dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from dist_checkpointing.mapping.nested_dicts import Path as StatePath, path_text
from dist_checkpointing.strategies.pickle_scanner import BadPickle
from dist_checkpointing.strategies.torch_archives import BadRecord, check_torch_file
from dist_checkpointing.validation.save_errors import Found, walk, without_values

logger: logging.Logger = logging.getLogger(__name__)

_CONTAINERS: Final = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    collections.OrderedDict,
    collections.Counter,
    collections.deque,
    argparse.Namespace,
    types.SimpleNamespace,
)
"""Types whose instances are plain if all values in them are plain."""

_HOLDERS: Final = (collections.defaultdict, slice, dt.datetime, dt.time, np.ndarray, np.dtype)
"""Types whose instances may hold anything."""

_VALUES: Final[tuple[Any, ...]] = (
    range,
    bool,
    bytearray,
    bytes,
    complex,
    float,
    int,
    str,
    dt.date,
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
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
    # Plain bytes: extra states of TransformerEngine.
    io.BytesIO,
)
"""Types whose instances are always plain."""

_ATOMS: Final = {*_VALUES, type(None), *np.sctypeDict.values()} - {np.object_, np.void}

SAFE_GLOBALS: tuple[Any, ...] = (
    *_CONTAINERS,
    *_HOLDERS,
    *_VALUES,
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


class _PlainPickling:
    """What ``torch.save`` asks a pickle module for."""

    Pickler = PlainPickler


def serialize(value: object, what: str) -> bytes:
    """``value`` as ``torch.save`` writes it.

    Raises:
        InvalidShardingError: if a sharded leaf is inside an object, where it would be lost, or the
            value is nested too deeply.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=_PlainPickling)
    except RecursionError:
        finding = Finding(f"{what} is nested too deeply", remedy="Flatten its dicts and lists.")
        raise InvalidShardingError("the state dict cannot be pickled", [finding]) from None
    content = buffer.getvalue()
    try:
        # Without a class or function in it, nothing is refused.
        names, _ = check_torch_file(content)
        refused = _refused_globals(buffer) if names else []
    except ValueError as error:
        refused = [*_refused_globals(buffer), f"a value that every load refuses ({error})"]
    hidden = [name for name in refused if name.startswith("dist_checkpointing.mapping")]
    if hidden:
        problem, found = f"a sharded leaf is inside an object of {what}", ", ".join(hidden)
        finding = Finding(problem, found=found, remedy=_NEST)
        raise InvalidShardingError("a sharded leaf would be lost", [finding])
    if refused:
        logger.warning(
            "%s holds %s, which can only be read back with trusted=True "
            "(or after torch.serialization.add_safe_globals)",
            what,
            ", ".join(refused),
        )
    return content


def deserialize(
    source: bytes | Path,
    where: str = "",
    *,
    trusted: bool = False,
    stand_ins: Sequence[tuple[Any, str]] = (),
) -> Any:
    """The value that ``torch.save`` wrote as bytes or to a file, with its tensors on the CPU.

    Messages say ``where`` bytes come from. With ``trusted`` they may run any code; else classes of
    plain data stand in for those that ``stand_ins`` names. A file is mapped: it keeps the values of
    tensors, and must not change meanwhile.

    Raises:
        UnsupportedFormatError: if it needs a class or function that is not on the allow-list, or is
            of before PyTorch 1.6.
        CorruptCheckpointError: if it is damaged.
    """
    where = where or str(source)
    file = str(source) if isinstance(source, Path) else io.BytesIO(source)
    try:
        _refuse_old(source, where)
        if not trusted:
            names, content = check_torch_file(source)
            if not names:
                return _WithoutClasses(io.BytesIO(content), encoding="utf-8").load()
        maps_file = isinstance(file, str)
        # A sparse tensor with indices out of range would crash the process when it is used.
        checks: Any = torch.sparse.check_sparse_tensor_invariants
        with _safe_globals_allowed(stand_ins), checks():
            value = torch.load(file, map_location="cpu", weights_only=not trusted, mmap=maps_file)
    except UnsupportedFormatError:
        raise
    except Exception as error:
        # torch would inflate what is compressed to look for names.
        is_damaged = trusted or isinstance(error, BadRecord)
        if refused := [] if is_damaged else _refused_globals(file, stand_ins):
            raise _refusal(
                "the file needs classes or functions that are not on the allow-list of plain data",
                where,
                "If you trust its source: torch.serialization.add_safe_globals([...]) for "
                "these classes, or trusted=True for everything.",
                ", ".join(refused),
            ) from error
        is_known = isinstance(error, BadPickle | BadRecord)
        problem = str(error) if is_known else f"{type(error).__name__}: {error}"
        finding = Finding(problem, path=where)
        message = "a file of the checkpoint cannot be read"
        raise CorruptCheckpointError(message, [finding]) from error
    if not trusted and _holds_pointers(value):
        raise _refusal(
            "the file holds a numpy array of Python objects, or one with fields outside of it",
            where,
            "Save a list instead, or pass trusted=True if you trust its source.",
        )
    return value


def _refuse_old(source: bytes | Path, where: str) -> None:
    if isinstance(source, Path):
        with source.open("rb") as file:
            source = file.read(len(OLD_TORCH_SIGNATURE))
    if source[: len(OLD_TORCH_SIGNATURE)] == OLD_TORCH_SIGNATURE:
        remedy = "With a current PyTorch: torch.save(torch.load(path), path)."
        finding = Finding("is not a zip archive", path=where, remedy=remedy)
        message = "a file of torch.save from before PyTorch 1.6 is not read"
        raise UnsupportedFormatError(message, [finding])


class _WithoutClasses(pickle.Unpickler):
    """Reads what was checked to hold no classes, functions or tensors."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise BadPickle(f"{module_name}.{global_name} was not found by the check")


def _refusal(
    problem: str, where: str, remedy: str, found: str | None = None
) -> UnsupportedFormatError:
    finding = Finding(problem, found=found, path=where, remedy=remedy)
    return UnsupportedFormatError("refused to unpickle", [finding])


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
    return bool(dtype.hasobject) or any(
        not 0 <= offset <= dtype.itemsize - field.itemsize or _has_objects(field)
        for field, offset, *_ in (dtype.fields or {}).values()
    )


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


# What a load would refuse.

_MOST_FINDINGS: Final = 20

_LEAVE_OUT: Final = (
    "Leave it out, save plain data instead, or wrap it in a LocalNonpersistentObject, which is "
    "never saved."
)
_NEST: Final = "Put it into dicts, lists and tuples: only these are searched."
_REMEDY: Final = (
    "Save plain data: dataclasses.asdict(config), member.name of an enum, state_dict() of a module "
    "or an optimizer. Or allow the class, here and wherever it is loaded: "
    "torch.serialization.add_safe_globals([...]). Or pass trusted=True to save and to load."
)


class _Odd(NamedTuple):
    """A value that must be pickled and read back to find out whether it is plain.

    Messages name it by ``key``, and say by ``where`` what of it is meant.
    """

    value: object
    key: str
    where: str


def _odd(found: Found, object_key: str | None, value: object, detail: str = "") -> _Odd:
    place = path_text(found.path)
    if object_key is None:
        return _Odd(value, place, detail)
    return _Odd(value, object_key, f"{detail} (in the ShardedObject at {place})")


def check_plain(
    common: Iterable[Found], objects: Mapping[StatePath, ShardedObject], *, trusted: bool
) -> None:
    """Check that ``load`` can read the values that are about to be pickled.

    If they are loaded with ``trusted=True``, it is enough that they can be pickled.

    Raises:
        InvalidShardingError: for values that cannot be pickled, tensors without values, and sharded
            leaves inside of objects, where they would not be found.
        UnsupportedFormatError: for values with a class or function that is not on the allow-list.
    """
    odd: list[_Odd] = []
    invalid: list[Finding] = []
    refused: list[Finding] = []
    nests = [(common, None), *((walk(leaf.data, path), leaf.key) for path, leaf in objects.items())]
    for values, object_key in nests:
        for found in values:
            value = found.value
            if type(value) in _ATOMS:
                continue
            if isinstance(value, ShardedBase | LocalNonpersistentObject):
                invalid.append(_hidden(_odd(found, object_key, value), _name(value)))
            elif isinstance(value, torch.Tensor) and value.is_meta:
                _, key, where = _odd(found, object_key, value)
                invalid += [
                    Finding(f"this tensor is {problem}{where}", key, remedy=remedy)
                    for problem, remedy in without_values(value)
                ]
            else:
                odd += [_odd(found, object_key, *part) for part in _odd_parts(value)]
    failures = _failures(odd, trusted=trusted)
    for entry, failure in islice(failures, max(0, _MOST_FINDINGS - len(invalid))):
        name = _name(entry.value)
        if not isinstance(failure, CheckpointingException):
            problem = f"a {name} cannot be pickled{entry.where}"
            text = f"{type(failure).__name__}: {failure}"
            invalid.append(Finding(problem, entry.key, found=text, remedy=_LEAVE_OUT))
            continue
        text = "; ".join(str(finding.found or finding.problem) for finding in failure.findings)
        if "dist_checkpointing.mapping" in text:
            invalid.append(_hidden(entry, text))
        else:
            problem = f"a {name} is not plain data, and load would refuse it{entry.where}"
            refused.append(Finding(problem, entry.key, found=text, remedy=_REMEDY))
    InvalidShardingError.raise_if(invalid, "values of the state dict cannot be saved")
    message = "values of the state dict could be saved, but load would refuse them"
    UnsupportedFormatError.raise_if(refused, message)


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _odd_parts(value: Any) -> list[tuple[object, str]]:
    """Parts of a value that may not be plain, and what they are of it; its items not included."""
    kind = type(value)
    if kind in _CONTAINERS:
        parts: list[tuple[object, str]] = []
        if kind is collections.OrderedDict and vars(value):
            parts.append((vars(value), ", which has attributes"))
        # The keys of a dict are not among the values of the nest.
        if isinstance(value, dict) and not _ATOMS.issuperset(map(type, value)):
            parts.append((list(value), ", the keys of a dict"))
        return parts
    if kind is collections.defaultdict:
        return [([value.default_factory, *value], ", its keys")]
    if kind in (torch.Tensor, torch.nn.Parameter):
        is_plain = not vars(value) and not _is_strange(value)
    else:
        is_plain = kind is np.ndarray and not value.dtype.hasobject
    return [] if is_plain else [(value, "")]


def _is_strange(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def _hidden(entry: _Odd, found: str) -> Finding:
    problem = f"a sharded leaf is inside an object{entry.where}"
    return Finding(problem, entry.key, found=found, remedy=_NEST)


def _failures(odd: Sequence[_Odd], *, trusted: bool) -> Iterator[tuple[_Odd, Exception]]:
    """The values that cannot be read back. Usually there are none: then one attempt is enough."""
    if odd and _failure_of([entry.value for entry in odd], trusted=trusted) is not None:
        for entry in odd:
            if (failure := _failure_of([entry.value], trusted=trusted)) is not None:
                yield entry, failure


def _failure_of(values: list[object], *, trusted: bool) -> Exception | None:
    """The error when the values are saved and loaded, without the values of their tensors."""
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer, pickle_module=_EmptyingPickling)
        if not trusted:
            deserialize(buffer.getvalue(), "a copy in memory")
    except Exception as error:  # noqa: BLE001 - the code of a class may raise anything
        return error
    return None


class _EmptyingPickler(PlainPickler):
    """Pickles tensors without their values, which do not matter for whether they can be read."""

    _inner: dict[int, torch.Tensor] | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and _is_strange(obj):
            # A sparse tensor consists of other tensors, and their values say how large it is.
            reduced: Any = obj.__reduce_ex__(2)  # type: ignore[no-untyped-call]
            found = (entry.value for entry in walk(reduced))
            inner = {id(v): v for v in found if isinstance(v, torch.Tensor)}
            self._inner = (self._inner or {}) | inner
            return reduced
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and id(obj) not in (self._inner or {}):
            empty = torch.empty(0, dtype=obj.dtype)
            if type(obj) is torch.nn.Parameter:
                empty = torch.nn.Parameter(empty, requires_grad=False)
            vars(empty).update(vars(obj))
            return empty.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


class _EmptyingPickling:
    Pickler = _EmptyingPickler
