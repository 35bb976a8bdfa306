"""The registry: it finds the strategy for an action, a backend and a version.

Backends are found lazily, through the entry-point group ``dist_checkpointing.strategies``. An entry
is named ``<action>.<backend>.<version>``, for example ``save_sharded.zarr.2``, and refers to a
callable without required arguments (usually the strategy class itself). The built-in backends are
the same records in code, so that they work from an uninstalled checkout too.
"""

from __future__ import annotations

import importlib
import sys
from collections import UserDict, defaultdict
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from dist_checkpointing.errors import CheckpointingException, Finding, StrategyNotFoundError, hint

ENTRY_POINT_GROUP = "dist_checkpointing.strategies"


class StrategyAction(Enum):
    """What a strategy does."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = [action.value for action in cls]
        expected = f"one of: {', '.join(known)}"
        finding = Finding("no such action" + hint(str(value), known), None, expected, repr(value))
        raise StrategyNotFoundError("Cannot find strategies for this action", [finding])


_PACKAGE = "dist_checkpointing.strategies"
_BUILT_IN = {
    "save_sharded.tensorstore.1": f"{_PACKAGE}.tensorstore.writer:TensorStoreSaveShardedStrategy",
    "load_sharded.tensorstore.1": f"{_PACKAGE}.tensorstore.reader:TensorStoreLoadShardedStrategy",
    "save_common.torch.1": f"{_PACKAGE}.common:TorchCommonSaveStrategy",
    "load_common.torch.1": f"{_PACKAGE}.common:TorchCommonLoadStrategy",
    "save_sharded.torch_dist.1": f"{_PACKAGE}.torch_dist:TorchDistSaveShardedStrategy",
    "load_sharded.torch_dist.1": f"{_PACKAGE}.torch_dist:TorchDistLoadShardedStrategy",
    "load_common.torch_dist.1": f"{_PACKAGE}.torch_dist:TorchDistCommonLoadStrategy",
    "save_sharded.zarr.1": f"{_PACKAGE}.zarr:ZarrSaveShardedStrategy",
    "load_sharded.zarr.1": f"{_PACKAGE}.zarr:ZarrLoadShardedStrategy",
    "save_sharded.zarr.2": f"{_PACKAGE}.zarr:Zarr3SaveShardedStrategy",
    "load_sharded.zarr.2": f"{_PACKAGE}.zarr:Zarr3LoadShardedStrategy",
    "save_sharded.safetensors.1": f"{_PACKAGE}.safetensors:SafetensorsSaveShardedStrategy",
    "load_sharded.safetensors.1": f"{_PACKAGE}.safetensors:SafetensorsLoadShardedStrategy",
    "load_common.safetensors.1": f"{_PACKAGE}.safetensors:SafetensorsCommonLoadStrategy",
    "save_sharded.torch_file.1": f"{_PACKAGE}.torch_file:TorchFileSaveShardedStrategy",
    "load_sharded.torch_file.1": f"{_PACKAGE}.torch_file:TorchFileLoadShardedStrategy",
    "load_common.torch_file.1": f"{_PACKAGE}.torch_file:TorchFileCommonLoadStrategy",
    "load_sharded.deepspeed.1": f"{_PACKAGE}.deepspeed:DeepSpeedLoadShardedStrategy",
    "load_common.deepspeed.1": f"{_PACKAGE}.deepspeed:DeepSpeedCommonLoadStrategy",
    "load_sharded.database.1": f"{_PACKAGE}.zarr.foreign_arrays:DatabaseLoadShardedStrategy",
}
_REFUSED = {
    "load_sharded.dcp.1": (
        "dist_checkpointing.interop.torch_dcp.storage_strategy:reader_must_be_named"
    ),
}


@cache
def kind_of(action: StrategyAction) -> type[Any]:
    """The class that all strategies for an action derive from."""
    # At the time of the call: that module imports this one.
    name = "".join(word.capitalize() for word in action.value.split("_"))
    kind: type[Any] = getattr(importlib.import_module(f"{_PACKAGE}.base"), f"{name}Strategy")
    return kind


@cache
def _loaded(place: str) -> Any:
    return EntryPoint("", place, ENTRY_POINT_GROUP).load()


class _OfAction(UserDict[tuple[str, int], Any]):
    """The available strategies for one action; ``data`` has those registered by a program."""

    def __init__(self, action: StrategyAction) -> None:
        super().__init__()
        self._action = action

    def __missing__(self, key: tuple[str, int]) -> Any:
        try:
            return get_default_strategy(self._action, *key)
        except StrategyNotFoundError as error:
            raise KeyError(key) from error

    def __contains__(self, key: object) -> bool:
        return key in available_strategies(self._action)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(available_strategies(self._action))

    def __len__(self) -> int:
        return len(available_strategies(self._action))


class _OfActions(defaultdict[str, _OfAction]):
    def __missing__(self, name: str) -> _OfAction:
        return self.setdefault(name, _OfAction(StrategyAction(name)))


default_strategies: defaultdict[str, _OfAction] = _OfActions(
    None, {action.value: _OfAction(action) for action in StrategyAction}
)
"""``{action.value: {(backend, version): strategy}}`` of all strategies that are available.

Those registered by a program come before all others, which are made for each lookup.
"""


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: Any
) -> None:
    """Use ``strategy`` for this action, backend and version from now on, in this process.

    Raises:
        CheckpointingException: if the strategy is not of the kind that the action needs.

    Example:
        >>> from dist_checkpointing.storage import StorageOptions
        >>> from dist_checkpointing.strategies import base
        >>> from dist_checkpointing.strategies.zarr import Zarr3SaveShardedStrategy
        >>> strategy = Zarr3SaveShardedStrategy(options=StorageOptions(threads=2))
        >>> action = base.StrategyAction.SAVE_SHARDED
        >>> base.register_default_strategy(action, "my_zarr", 2, strategy)
        >>> del base.default_strategies["save_sharded"]["my_zarr", 2]  # no longer used
    """
    action = StrategyAction(action)
    where = (action.value, backend, version)
    require_strategy(action, strategy, f"cannot register a strategy for {where}")
    default_strategies[action.value][backend, version] = strategy


def require_strategy(action: StrategyAction, strategy: Any, message: str, others: str = "") -> None:
    """Refuse what is no strategy for an action; ``others`` says what else it might have been."""
    kind = kind_of(action)
    if isinstance(strategy, kind):
        return
    is_class = isinstance(strategy, type)
    finding = Finding(
        "not a strategy for this",
        expected=f"an object of a class derived from {kind.__name__}{others}",
        found=f"the class {strategy.__name__}" if is_class else type(strategy).__name__,
        remedy="Make an object of the class." if is_class else f"Derive from {kind.__name__}.",
    )
    raise CheckpointingException(message, [finding])


@cache
def _installed(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The names of all entry points; to look for them takes longer than a small save."""
    del paths  # what they depend on
    return tuple(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))


def available_strategies(action: StrategyAction) -> list[tuple[str, int]]:
    """Each (backend, version) that is available for an action. None of them is imported.

    Example:
        >>> from dist_checkpointing.strategies.registry import StrategyAction, available_strategies
        >>> ("zarr", 2) in available_strategies(StrategyAction.SAVE_SHARDED)
        True
    """
    found = set(default_strategies[action.value].data)
    for name in (*_BUILT_IN, *_installed(tuple(sys.path))):
        wanted, _, rest = name.partition(".")
        backend, _, version = rest.rpartition(".")
        if wanted == action.value and backend and version.isdecimal():
            found.add((backend, int(version)))
    return sorted(found)


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """The strategy for an action, backend and version.

    Raises:
        StrategyNotFoundError: if nothing provides it, or there is no such action. The error lists
            what is available.
        CheckpointingException: if a package that it imports is missing, or a method that it needs.

    Example:
        >>> from dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
        >>> strategy = get_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 2)
        >>> print(strategy)
        Zarr3SaveShardedStrategy(zarr, 2)
    """
    action = StrategyAction(action)
    registered = default_strategies[action.value].data.get((backend, version))
    if registered is not None:
        return registered
    wanted = (action.value, backend, version)
    name = f"{action.value}.{backend}.{version}"
    own = _BUILT_IN.get(name) or _REFUSED.get(name)
    places = [own] if own else [e.value for e in entry_points(group=ENTRY_POINT_GROUP, name=name)]
    for place in places:
        try:
            make = _loaded(place)
        except (ImportError, AttributeError) as error:
            raise CheckpointingException(
                f"Cannot import a default strategy for: {wanted}. Error: {error}. "
                f"Hint: install the package that provides {place!r} and what it needs"
            ) from error
        try:
            return make()
        except CheckpointingException:
            raise
        except Exception as error:
            # A class that lacks an abstract method, for example, which the text names.
            finding = Finding(
                f"{type(error).__name__}: {error}",
                found=place,
                remedy="Repair the package that provides it.",
            )
            message = f"cannot make the strategy for {wanted}"
            raise CheckpointingException(message, [finding]) from error
    available = available_strategies(action)
    names = sorted({name for name, _ in available})
    finding = Finding(
        "no such backend and version" + ("" if backend in names else hint(backend, names)),
        expected=f"one of: {', '.join(f'{name} {number}' for name, number in available)}",
        found=f"{backend} {version}",
        remedy=f"Install a package with an entry point in the group {ENTRY_POINT_GROUP!r}, "
        "or call register_default_strategy.",
    )
    raise StrategyNotFoundError(f"Cannot find a default strategy for: {wanted}", [finding])


def newest_version(action: StrategyAction, backend: str) -> int:
    """The highest available version of a backend for an action; 1 if there is no version."""
    if all(name != backend for name, _ in available_strategies(action)):
        _installed.cache_clear()  # it may have been installed meanwhile
    return max((v for name, v in available_strategies(action) if name == backend), default=1)
