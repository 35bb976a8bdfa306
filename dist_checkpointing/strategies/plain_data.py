"""Finds values that ``load`` would refuse to unpickle, before they are saved.

Most of a common state is plain data, recognised by type. Other values are pickled, without the
values of their tensors, and read back as ``load`` reads them.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import io
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from dist_checkpointing.mapping.nested_dicts import Path, path_text
from dist_checkpointing.strategies.safe_pickle import (
    SAFE_GLOBALS,
    PlainPickler,
    deserialize,
    pickle_module,
)
from dist_checkpointing.validation.unwrapped import Found, walk, without_values

_MOST_FINDINGS: Final = 20

_CONTAINERS: Final[frozenset[type]] = frozenset(
    {
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
    }
)
"""Types whose instances are plain if all values in them are plain."""

_HOLDERS: Final = frozenset({slice, dt.datetime, dt.time, np.ndarray, np.dtype})
"""Types on the allow-list whose instances may hold anything."""

_ATOMS: Final = (
    {entry for entry in SAFE_GLOBALS if isinstance(entry, type)}
    - _CONTAINERS
    - _HOLDERS
    - {collections.defaultdict}
    | {type(None)}
    | {kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)}
)
"""Types whose instances are always plain."""

_REMEDY: Final = (
    "Save plain data: dataclasses.asdict(config), member.name of an enum, state_dict() of a module "
    "or an optimizer. Or allow the class, here and wherever it is loaded: "
    "torch.serialization.add_safe_globals([...]). Or pass trusted=True to save and to load."
)


@dataclass(frozen=True, slots=True)
class _Odd:
    """A value that must be pickled and read back to find out whether it is plain.

    It belongs to a value of the state dict, of which ``detail`` says the part, and may be in a
    ShardedObject.
    """

    value: object
    found: Found
    object_key: str | None
    detail: str = ""

    @property
    def key(self) -> str:
        """The name of the value in messages."""
        return path_text(self.found.path) if self.object_key is None else self.object_key

    @property
    def where(self) -> str:
        """Where the value is, as far as ``key`` does not tell."""
        if self.object_key is None:
            return self.detail
        return f"{self.detail} (in the ShardedObject at {path_text(self.found.path)})"


def check_plain(
    common: Mapping[Any, Any], objects: Mapping[Path, ShardedObject], *, trusted: bool
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
    for found in walk(common):
        if type(found.value) not in _ATOMS:
            _sort_in(found, None, odd, invalid)
    for path, leaf in objects.items():
        for found in walk(leaf.data, path):
            if type(found.value) not in _ATOMS:
                _sort_in(found, leaf.key, odd, invalid)
    refused: list[Finding] = []
    if odd:
        _try_out(odd, invalid, refused, trusted=trusted)
    if invalid:
        raise InvalidShardingError("values of the state dict cannot be saved", invalid)
    if refused:
        message = "values of the state dict could be saved, but load would refuse them"
        raise UnsupportedFormatError(message, refused)


def _sort_in(found: Found, object_key: str | None, odd: list[_Odd], invalid: list[Finding]) -> None:
    value, kind = found.value, type(found.value)
    own = _Odd(value, found, object_key)
    if isinstance(value, ShardedBase | LocalNonpersistentObject):
        invalid.append(_hidden(own, f"{kind.__module__}.{kind.__qualname__}"))
    elif isinstance(value, torch.Tensor):
        if value.is_meta:
            invalid += [
                Finding(f"this tensor is {problem}{own.where}", own.key, remedy=remedy)
                for problem, remedy in without_values(value)
            ]
        elif kind not in (torch.Tensor, torch.nn.Parameter) or vars(value) or _is_strange(value):
            odd.append(own)
    elif kind in _CONTAINERS:
        if kind is collections.OrderedDict and vars(value):
            odd.append(replace(own, value=vars(value), detail=", which has attributes"))
        # The keys of a dict are not among the values of the nest.
        if isinstance(value, dict) and not _ATOMS.issuperset(map(type, value)):
            odd.append(replace(own, value=list(value), detail=", the keys of a dict"))
    elif kind is collections.defaultdict:
        odd.append(replace(own, value=[value.default_factory, *value], detail=", its keys"))
    elif kind is not np.ndarray or value.dtype.hasobject:
        odd.append(own)


def _is_strange(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def _hidden(entry: _Odd, found: str) -> Finding:
    return Finding(
        f"a sharded leaf is inside an object{entry.where}",
        entry.key,
        found=found,
        remedy="Put it into dicts, lists and tuples: only these are searched.",
    )


def _try_out(
    odd: Sequence[_Odd], invalid: list[Finding], refused: list[Finding], *, trusted: bool
) -> None:
    """Find the values that cannot be read back. Usually there are none: then one attempt is enough.

    Otherwise each half is tried by itself.
    """
    if len(invalid) + len(refused) >= _MOST_FINDINGS:
        return
    failure = _failure_of([entry.value for entry in odd], trusted=trusted)
    if failure is None:
        return
    if len(odd) > 1:
        half = len(odd) // 2
        _try_out(odd[:half], invalid, refused, trusted=trusted)
        _try_out(odd[half:], invalid, refused, trusted=trusted)
        return
    entry, kind = odd[0], type(odd[0].value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(failure, CheckpointingException):
        invalid.append(
            Finding(
                f"a {name} cannot be pickled{entry.where}",
                entry.key,
                found=f"{type(failure).__name__}: {failure}",
                remedy="Leave it out, save plain data instead, or wrap it in a "
                "LocalNonpersistentObject, which is never saved.",
            )
        )
        return
    found = "; ".join(str(finding.found or finding.problem) for finding in failure.findings)
    if "dist_checkpointing.mapping" in found:
        invalid.append(_hidden(entry, found))
        return
    problem = f"a {name} is not plain data, and load would refuse it{entry.where}"
    refused.append(Finding(problem, entry.key, found=found, remedy=_REMEDY))


def _failure_of(values: list[object], *, trusted: bool) -> Exception | None:
    """The error when the values are saved and loaded, without the values of their tensors."""
    buffer = io.BytesIO()
    try:
        torch.save(values, buffer, pickle_module=pickle_module(_EmptyingPickler))
    except Exception as error:  # noqa: BLE001 - the code of a class may raise anything
        return error
    if trusted:
        return None
    try:
        deserialize(buffer.getvalue(), "a copy in memory")
    except CheckpointingException as error:
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
