"""``install()``: names of Megatron's package become ours; a table of modules; its defaults;
folders it saved.
"""

from __future__ import annotations

import importlib
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.filesystem.locks import FolderLock
from dist_checkpointing.format.commit import check_is_distributed_checkpoint, read_config
from dist_checkpointing.format.leftovers import attempt_of, leftovers, note_attempt
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    get_default_strategy,
    newest_version,
)

_DATA = re.compile(r".*__\d+_\d+\.distcp")
_FILES = re.compile(r"metadata\.json|common\.pt|\.metadata(\.tmp|\.bck)?")
_PARTS = re.compile(r"\.zarray|shard_.*\.pt")
"""What lies in the folder of a tensor of zarr, of its locks, or of a sharded object."""


def adopt(folder: Path) -> None:
    """Note what Megatron has left in a folder as what a save into it may replace.

    That is a checkpoint, or the data files and what belongs to them of a save that did not come to
    its end. Nothing is deleted: a checkpoint that is there stays one.

    Raises:
        CheckpointExistsError: if a save is writing there.
    """
    if not local_folder.is_folder(folder):
        return
    with FolderLock.acquire(folder):
        known, theirs = leftovers(folder), _made_by_megatron(folder)
        if theirs - known:
            attempt, names = attempt_of(folder) or uuid.uuid4().hex, sorted(theirs | known)
            note_attempt(folder, attempt, names, local_folder.Durability.FSYNC)


def _made_by_megatron(folder: Path) -> set[str]:
    is_whole = check_is_distributed_checkpoint(folder)
    paths = [path for path in folder.iterdir() if not path.is_symlink()]
    data = {path.name for path in paths if _DATA.fullmatch(path.name)}
    if not is_whole and not data:
        return set()
    found = data | {path.name for path in paths if _FILES.fullmatch(path.name)}
    if is_whole and read_config(folder).sharded_backend == "zarr":
        # Each array in such a checkpoint is a tensor of it; elsewhere one may be anybody's.
        folders = (path for path in paths if path.is_dir())
        found |= {p.name for p in folders if any(_PARTS.fullmatch(q.name) for q in p.iterdir())}
    return found


@dataclass(frozen=True, slots=True)
class MegatronDefaults:
    """How ``save`` and ``load`` of the package that Megatron imports behave.

    Attributes:
        backend: Backend, and its version, of a save that names no strategy.
        validate: Whether a load checks that the shards of all ranks make up each tensor once.
        cast: What to do where stored and wanted dtype differ. Megatron converts and says nothing.
        overwrite: Whether a save may replace a checkpoint, also one that Megatron wrote.
        trusted: Whether loads unpickle anything, and saves take anything that pickles.

    Example:
        >>> from dist_checkpointing.interop.megatron import MegatronDefaults
        >>> MegatronDefaults().backend
        ('torch_dist', 1)
    """

    backend: tuple[str, int] = ("torch_dist", 1)
    validate: bool = True
    cast: Literal["error", "widen", "any"] = "any"
    overwrite: bool = True
    trusted: bool = False


_in_use = MegatronDefaults()


def defaults() -> MegatronDefaults:
    """The defaults that are in use in this process."""
    return _in_use


def use(**changes: Any) -> None:
    """Use these values from now on, and for the others those of the class."""
    global _in_use  # noqa: PLW0603 - an import hook is one for a process, and so is what it means
    _in_use = replace(MegatronDefaults(), **changes)


PACKAGE = "megatron.core.dist_checkpointing"
_MODULES = "dist_checkpointing.interop.megatron.modules"
_AS_IT_IS = ("mapping", "strategies.checkpointable")
"""Modules that have the same names here as in Megatron."""
_INTERNAL = tuple(
    f"strategies.{name}"
    for name in ("cached_metadata_filesystem_reader", "state_dict_saver", "two_stage")
)


class LeftOutError(ImportError):
    """A name of Megatron's that is about its insides, which this library does not have."""


def _left_out(name: str) -> str:
    return (
        f"{name} is internal to Megatron's way of saving and has no counterpart in "
        f"dist_checkpointing, which stands for {PACKAGE} here"
    )


def forwarding(
    module: str,
    source: str = "",
    without_effect: Container[str] = (),
    left_out: Container[str] = (),
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module.

    Args:
        module: Name of the module.
        source: Module that has the names which are the same here.
        without_effect: Names of functions that need do nothing here.
        left_out: Names of classes and functions that are left out. To import one warns, since it
            may not be used; to call it raises LeftOutError.
    """

    def find(name: str) -> Any:
        if name in left_out:
            message = _left_out(f"{PACKAGE}{module.removeprefix(_MODULES)}.{name}")
            warnings.warn(message, stacklevel=3)

            def refuse(*_: Any, **__: Any) -> NoReturn:
                raise LeftOutError(message)

            return type(name, (), {"__new__": refuse})
        if name in without_effect:
            return lambda: None
        if not source:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(source), name)

    return find


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of Megatron's package, and loads ours in their place."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        ours = _ours(fullname)
        if fullname.removeprefix(f"{PACKAGE}.") in _INTERNAL:
            raise LeftOutError(_left_out(fullname), name=fullname)
        # Nobody else may find it: a second copy of Megatron's or of our module would be loaded.
        if find_spec(ours) is None:
            raise ModuleNotFoundError(f"no module named {fullname!r}", name=fullname)
        return ModuleSpec(fullname, self, is_package=fullname in (PACKAGE, f"{PACKAGE}.strategies"))

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_ours(module.__name__))


def _ours(name: str) -> str:
    below = name[len(PACKAGE) + 1 :]
    if below in _AS_IT_IS:
        return f"dist_checkpointing.{below}"
    return f"{_MODULES}.{below}" if below else _MODULES


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
    real = [name for name in _imported() if sys.modules[name].__name__ != _ours(name)]
    if real:
        finding = Finding(
            "was imported before",
            found=", ".join(real[:3]) + (", ..." if len(real) > 3 else ""),
            remedy="Call install() at the top of the script, or run the script by "
            "python -m dist_checkpointing.interop.megatron.",
        )
        raise CheckpointingException(f"{PACKAGE} cannot be replaced any more", [finding])
    use(backend=backend, trusted=trusted)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Let the next import of ``megatron.core.dist_checkpointing`` find Megatron's own.

    What has been imported until then keeps the names of this library.

    Example:
        >>> from dist_checkpointing.interop import megatron
        >>> megatron.uninstall()
    """
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in _imported():
        del sys.modules[name]
    parent, _, own = PACKAGE.rpartition(".")
    vars(sys.modules.get(parent, ModuleType(parent))).pop(own, None)
    use()


def _imported() -> list[str]:
    return [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
