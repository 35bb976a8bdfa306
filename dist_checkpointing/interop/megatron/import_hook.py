"""``install()``: names of Megatron's package become ours, by a table of its modules."""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    get_default_strategy,
    newest_version,
)


class Installed(NamedTuple):
    """The arguments of ``install`` that are in use in this process."""

    backend: tuple[str, int] = ("torch_dist", 1)
    trusted: bool = False


in_use: Installed = Installed()


PACKAGE = "megatron.core.dist_checkpointing"
_LIBRARY = "dist_checkpointing"


_SOURCES = {
    "": ".serialization mapping serialization",
    "core": ".serialization errors",
    "dict_utils": ".state_dicts",
    "exchange_utils": ".shard_exchange",
    "mapping": "mapping",
    "optimizer": ".optimizer",
    "serialization": ".serialization serialization",
    "state_dict_utils": ".tensor_aware_state_dict",
    "strategies": "",
    "strategies.async_utils": "strategies.async_calls",
    "strategies.base": ".strategies strategies.base",
    "strategies.checkpointable": "strategies.checkpointable",
    "strategies.common": "strategies.common",
    "strategies.filesystem_async": ".strategies",
    "strategies.fully_parallel": ".strategies",
    "strategies.tensorstore": "strategies.tensorstore",
    "strategies.torch": ".strategies",
    "strategies.zarr": "strategies.zarr",
    "tensor_aware_state_dict": ".tensor_aware_state_dict",
    "utils": ".state_dicts",
    "validation": ".validation",
}
"""Megatron's modules, and those that have their names: of this package, which begin with a dot, or
of the library. The first one that has a name counts."""

_LEFT_OUT = {
    "strategies.async_utils": "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller",
    "strategies.filesystem_async": "FileSystemWriterAsync",
    "strategies.torch": "MCoreLoadPlanner MCoreSavePlanner get_reformulation_metadata",
}
"""Classes and functions that are left out, by module. To import one warns, since it may not be
used; to call it raises LeftOutError."""

_INTERNAL = tuple(
    f"strategies.{name}"
    for name in ("cached_metadata_filesystem_reader", "resharding", "state_dict_saver", "two_stage")
)


class LeftOutError(ImportError):
    """A name of Megatron's that is about its insides, which this library does not have."""


def _left_out(name: str) -> str:
    return (
        f"{name} is internal to Megatron's way of saving and has no counterpart in "
        f"dist_checkpointing, which stands for {PACKAGE} here"
    )


def _below(fullname: str) -> str:
    return fullname[len(PACKAGE) + 1 :]


def _attribute(module: str, name: str) -> Any:
    below = _below(module)
    if name in _LEFT_OUT.get(below, "").split():
        message = _left_out(f"{module}.{name}")
        warnings.warn(message, stacklevel=2)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise LeftOutError(message)

        return type(name, (), {"__new__": refuse})
    if name.startswith("register_default_"):
        return lambda: None  # ours are registered
    if _below(f"{module}.{name}") in _SOURCES:
        return importlib.import_module(f"{module}.{name}")
    for source in () if name.startswith("__") else _SOURCES[below].split():
        package = f"{__package__}{source}" if source.startswith(".") else f"{_LIBRARY}.{source}"
        found = getattr(importlib.import_module(package), name, importlib)
        if not isinstance(found, ModuleType):
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        if _below(fullname) in _INTERNAL:
            raise LeftOutError(_left_out(fullname), name=fullname)
        # Nobody else may find it: a second copy of Megatron's module would be loaded.
        if _below(fullname) not in _SOURCES:
            raise ModuleNotFoundError(f"no module named {fullname!r}", name=fullname)
        return ModuleSpec(fullname, self, is_package=_below(fullname) in ("", "strategies"))

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = partial(_attribute, module.__name__)


_finder = _Finder()


def install(backend: str | tuple[str, int] = "torch_dist", *, trusted: bool = False) -> None:
    """Make ``megatron.core.dist_checkpointing`` and all below it resolve to this library.

    Call it before anything imports that package. A second call changes the arguments.

    Args:
        backend: Name, or name and version, of the backend of a save that names no strategy.
        trusted: Unpickle anything that a checkpoint holds, which lets it run any code, and save
            anything that pickles.

    Raises:
        CheckpointingException: if Megatron's package is imported already.
        StrategyNotFoundError: if the backend is unknown.

    Example:
        >>> from dist_checkpointing.interop import megatron
        >>> megatron.install()
        >>> megatron.uninstall()
    """
    if isinstance(backend, str):
        backend = (backend, newest_version(StrategyAction.SAVE_SHARDED, backend))
    get_default_strategy(StrategyAction.SAVE_SHARDED, *backend)  # now, and not in the first save
    real = [name for name in _imported() if getattr(sys.modules[name], "__loader__", 0) != _finder]
    if real:
        finding = Finding(
            "was imported before",
            found=", ".join(real[:3]) + (", ..." if len(real) > 3 else ""),
            remedy="Call install() at the top of the script, or run the script by "
            "python -m dist_checkpointing.interop.megatron.",
        )
        raise CheckpointingException(f"{PACKAGE} cannot be replaced any more", [finding])
    global in_use  # noqa: PLW0603 - an import hook is one for a process, and so is what it means
    in_use = Installed(backend, trusted)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Let the next import of ``megatron.core.dist_checkpointing`` find Megatron's own.

    What has been imported until then keeps the names of this library.

    Example:
        >>> from dist_checkpointing.interop import megatron
        >>> megatron.uninstall()
    """
    global in_use  # noqa: PLW0603 - see ``install``
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in _imported():
        del sys.modules[name]
    parent, _, own = PACKAGE.rpartition(".")
    vars(sys.modules.get(parent, ModuleType(parent))).pop(own, None)
    in_use = Installed()


def _imported() -> list[str]:
    return [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
