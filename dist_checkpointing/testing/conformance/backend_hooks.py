"""What a suite says about its backend; how its tests save, load and observe the storage."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.foreign_formats import COMMON_STATE_FNAME
from dist_checkpointing.format.leftovers import CONFIG_FNAME
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.serialization import load, load_tensors_metadata, save
from dist_checkpointing.strategies import (
    LoadShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveShardedStrategy,
    StrategyAction,
)
from dist_checkpointing.strategies.selection import Selection, select_strategy
from dist_checkpointing.testing.conformance.sample_shards import assert_loaded, blank
from dist_checkpointing.testing.simulated_ranks import run_ranks

StateOf = Callable[[int], dict[str, Any]]
"""Returns the state dict or template of a rank."""
Observe = Callable[[str, Sequence[Any]], None]
"""Called with the name and arguments of a method before it runs, then with ``"<name>.done"`` and
its result. An error that it raises is raised by the method."""

_PLANNING = ("prepare_local_plan", "prepare_global_plan")
WRITER_CALLS = ("set_up_storage_writer", *_PLANNING, "write_data", "finish")
READER_CALLS = ("read_metadata", "set_up_storage_reader", *_PLANNING, "read_data")

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])
Strategy = TypeVar("Strategy", PlannedSaveStrategy, PlannedLoadStrategy)


class BackendHooks:
    """What a subclass may set or override; it must set ``backend``."""

    backend: ClassVar[tuple[str, int]]
    """The (name, version) that is recorded in the checkpoint."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(row.torch for row in DTYPES)
    """The dtypes that the backend can store; by default all that the library knows."""

    refused_keys: ClassVar[frozenset[str]] = frozenset()
    """The keys in ``contents.WEIRD_KEYS`` that the backend cannot store, as its documentation says.
    It must refuse them with InvalidShardingError; all others must work."""

    def save_strategy(self) -> Selection[SaveShardedStrategy]:
        """The strategy for ``save``; called on every rank."""
        return self.backend

    def load_strategy(self) -> Selection[LoadShardedStrategy]:
        """The strategy for ``load``; None for the one that the checkpoint names."""
        return None

    def damage(self, folder: Path, key: str) -> None:
        """Destroy stored values of the tensor ``key``, by far the largest in the checkpoint.

        By default, the largest file of the backend is deleted.
        """
        del key
        _largest_file(folder).unlink()

    def shorten(self, folder: Path, key: str) -> None:
        """Cut off a part of the stored values of the tensor ``key``, as a full disk would."""
        del key
        path = _largest_file(folder)
        os.truncate(path, path.stat().st_size // 2)

    def saver(self) -> Any:
        """The strategy object that ``save_strategy`` means."""
        return select_strategy(StrategyAction.SAVE_SHARDED, self.save_strategy())

    def loader(self) -> Any:
        """The strategy object for ``load_strategy``."""
        return select_strategy(StrategyAction.LOAD_SHARDED, self.load_strategy() or self.backend)

    def save_on(self, world_size: int, folder: Path, state_of: StateOf, **options: Any) -> None:
        """Save the state dicts of simulated ranks, by default with the backend's strategy."""

        def one(comm: Comm) -> None:
            chosen = {"sharded_strategy": self.save_strategy()} | options
            save(state_of(comm.rank), folder, comm=comm, **chosen)

        run_ranks(world_size, one)

    def load_on(
        self, world_size: int, folder: Path, template_of: StateOf, **options: Any
    ) -> list[Any]:
        """Load the templates of simulated ranks; returns the results of ``load`` in rank order."""

        def one(comm: Comm) -> Any:
            return load(template_of(comm.rank), folder, self.load_strategy(), comm=comm, **options)

        return run_ranks(world_size, one)

    def check_on(self, world_size: int, folder: Path, nest_of: StateOf) -> None:
        """Load the shards of simulated ranks, each over wrong values, and compare each bit."""
        loaded = self.load_on(world_size, folder, lambda rank: blank(nest_of(rank)))
        for rank, result in enumerate(loaded):
            nest = nest_of(rank)
            assert result.keys() == nest.keys()
            assert_loaded(result, nest, f"rank {rank} of {world_size}")

    def load_whole(self, folder: Path) -> dict[str, Any]:
        """All tensors whole, in this process, by key, and the common state."""
        strategy = self.load_strategy()
        everything: Any = load_tensors_metadata(folder, strategy)
        return load(everything, folder, strategy)


def _largest_file(folder: Path) -> Path:
    ours = {folder / CONFIG_FNAME, folder / COMMON_STATE_FNAME, *(folder / ".dckpt").rglob("*")}
    files = [path for path in folder.rglob("*") if path.is_file() and path not in ours]
    return max(files, key=lambda path: path.stat().st_size)


def failures_on(world_size: int, step: Callable[[Comm], object]) -> list[Exception]:
    """The errors of all ranks: every rank must raise, and all must raise the same error."""

    def attempt(comm: Comm) -> Exception | None:
        try:
            step(comm)
        except Exception as error:  # noqa: BLE001 - the test looks at its class
            return error
        return None

    errors = run_ranks(world_size, attempt)
    raised = [error for error in errors if error is not None]
    assert len(raised) == world_size, f"only some ranks raised: {errors}"
    texts = {f"{type(error).__name__}: {error}" for error in raised}
    assert len(texts) == 1, f"the ranks raised different errors: {texts}"
    return raised


def observed(strategy: Strategy, observe: Observe) -> Strategy:
    """A copy of the strategy whose writers or readers report every call."""
    copied: Any = copy.copy(strategy)
    name, calls = "make_reader", READER_CALLS
    if isinstance(strategy, PlannedSaveStrategy):
        name, calls = "make_writer", WRITER_CALLS
    make = getattr(strategy, name)

    def reporting(folder: Path) -> Any:
        # A subclass, so that the driver and the backend still recognise it; set on the object
        # itself, because its constructor may take any arguments.
        storage = make(folder)
        kind = type(storage)
        methods = {call: _reporting(call, getattr(kind, call), observe) for call in calls}
        storage.__class__ = type(kind.__name__, (kind,), methods)
        return storage

    setattr(copied, name, reporting)
    return copied  # type: ignore[no-any-return]


def _reporting(name: str, method: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    @functools.wraps(method)  # with its parameters, which say what it is told
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        observe(name, args)
        result = method(self, *args, **kwargs)
        observe(f"{name}.done", (result,))
        return result

    return call
