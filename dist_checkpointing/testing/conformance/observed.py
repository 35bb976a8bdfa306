"""A backend's own writer and reader, with every call of the storage protocol seen on its way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dist_checkpointing.storage.protocol import StorageReader, StorageWriter
from dist_checkpointing.strategies.planned import PlannedLoadStrategy, PlannedSaveStrategy

Observe = Callable[[str, Sequence[Any]], None]
"""Called with a method's name and arguments before it runs, then with ``"<name>.done"`` and its
result. What it raises, the call raises."""

WRITER_CALLS = (
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
)
READER_CALLS = (
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)

_Storage = TypeVar("_Storage", StorageWriter, StorageReader)


def observed_save(strategy: PlannedSaveStrategy, observe: Observe) -> PlannedSaveStrategy:
    """A copy of the strategy whose writers tell of every call."""
    observed, make_writer = copy.copy(strategy), strategy.make_writer

    def make(checkpoint_dir: Path) -> StorageWriter:
        return _observed(make_writer(checkpoint_dir), WRITER_CALLS, observe)

    observed.make_writer = make  # type: ignore[method-assign]
    return observed


def observed_load(strategy: PlannedLoadStrategy, observe: Observe) -> PlannedLoadStrategy:
    """A copy of the strategy whose readers tell of every call."""
    observed, make_reader = copy.copy(strategy), strategy.make_reader

    def make(checkpoint_dir: Path) -> StorageReader:
        return _observed(make_reader(checkpoint_dir), READER_CALLS, observe)

    observed.make_reader = make  # type: ignore[method-assign]
    return observed


def _observed(storage: _Storage, names: Sequence[str], observe: Observe) -> _Storage:
    # A subclass of the storage's own class, so that it is still what the driver and the backend
    # take it for, however its constructor looks.
    kind = type(storage)
    methods = {name: _telling(name, getattr(kind, name), observe) for name in names}
    storage.__class__ = type(kind.__name__, (kind,), methods)
    return storage


def _telling(name: str, method: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        observe(name, args)
        result = method(self, *args, **kwargs)
        observe(f"{name}.done", (result,))
        return result

    return call
