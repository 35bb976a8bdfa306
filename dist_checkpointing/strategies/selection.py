"""Which strategy a caller means, and a checkpoint as the strategies that read it open it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeAlias, TypeVar, Union

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointNotFoundError, Finding
from dist_checkpointing.filesystem.location import as_location, is_seen, relative
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format import commit
from dist_checkpointing.format.foreign_formats import is_database
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import CONFIG_FNAME, number_of_save
from dist_checkpointing.format.run_steps import located
from dist_checkpointing.mapping import CommonStateDict, ShardedObject
from dist_checkpointing.mapping.nested_dicts import AtPaths, Path as TreePath, value_at
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.storage.driver import read
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.progress import Meter
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveStrategyBase,
    handles_objects,
    lacks,
    share_index,
)
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    get_default_strategy,
    newest_version,
    require_strategy,
)
from dist_checkpointing.strategies.unplanned_strategies import as_planned
from dist_checkpointing.threads import paused_collector

S = TypeVar("S")
T = TypeVar("T")

Selection: TypeAlias = Union[S, str, tuple[str, int], None]  # noqa: UP007 - S | str is no alias
"""A strategy, the name of a backend, its name and version, or None for the default."""

DEFAULT_SHARDED = ("tensorstore", 1)
DEFAULT_COMMON = ("torch", 1)


def select_strategy(
    action: StrategyAction, selection: Any, default: tuple[str, int] | None = None
) -> Any:
    """The strategy for what a caller passed.

    ``default`` is the (name, version) that None means, and that the name alone means. By default it
    is the default backend, and for a name its newest version.

    Raises:
        StrategyNotFoundError: if nothing provides it.
        CheckpointingException: if it is of another kind, or lacks what it needs.
    """
    if isinstance(selection, str):
        is_default = default is not None and selection == default[0]
        selection = default if is_default else (selection, newest_version(action, selection))
    if selection is None:
        is_common = action in (StrategyAction.SAVE_COMMON, StrategyAction.LOAD_COMMON)
        selection = default or (DEFAULT_COMMON if is_common else DEFAULT_SHARDED)
    if isinstance(selection, tuple) and list(map(type, selection)) == [str, int]:
        selection = get_default_strategy(action, *selection)
    message = f"no strategy of {action.value}: {selection!r}"
    require_strategy(action, selection, message, ", a backend name or (name, version)")
    # A class that is not finished is refused now, and not in the middle of a save.
    for name in ("backend", "version") if isinstance(selection, SaveStrategyBase) else ():
        if not hasattr(selection, name):
            raise lacks(selection, name, "super().__init__(backend, version) sets")
    for planned, maker, name in (
        (PlannedSaveStrategy, "make_writer", "writer_type"),
        (PlannedLoadStrategy, "make_reader", "reader_type"),
    ):
        is_own = getattr(type(selection), maker, None) is not getattr(planned, maker)
        if isinstance(selection, planned) and not is_own and not hasattr(selection, name):
            raise lacks(selection, name, f"{maker} needs")
    return selection


@dataclass(frozen=True, slots=True)
class LoadStrategies:
    """What reads a checkpoint."""

    config: commit.CheckpointingConfig
    sharded: PlannedLoadStrategy
    common: LoadCommonStrategy

    def objects(self, checkpoint_dir: Location) -> dict[str, ShardedObject]:
        """The sharded objects by unique key, without data."""
        strategy = self.sharded if handles_objects(self.sharded) else self.common
        metadata = strategy.load_sharded_metadata(checkpoint_dir)
        return {name: leaf for name, leaf in metadata.items() if isinstance(leaf, ShardedObject)}


def open_checkpoint(
    checkpoint_dir: str | PathLike[str],
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    common_strategy: Selection[LoadCommonStrategy] = None,
    *,
    trusted: bool = False,
) -> LoadStrategies:
    """Find the strategies for a committed checkpoint, which unpickle anything if ``trusted``.

    Raises:
        CheckpointNotFoundError: if nothing is committed there.
        StrategyNotFoundError: if no strategy reads its backend.
        UnsupportedFormatError: if the strategy that the caller chose does not read it.
    """
    config = commit.read_config(checkpoint_dir)
    return LoadStrategies(
        config,
        sharded_reader(config, sharded_strategy, trusted=trusted),
        common_reader(config, common_strategy, trusted=trusted),
    )


def sharded_reader(
    config: commit.CheckpointingConfig,
    sharded_strategy: Selection[LoadShardedStrategy] = None,
    *,
    trusted: bool = False,
) -> PlannedLoadStrategy:
    """The strategy for the tensors alone."""
    form = config.sharded_backend, config.sharded_backend_version
    chosen = _reading(StrategyAction.LOAD_SHARDED, sharded_strategy, form)
    sharded = as_planned(chosen.for_format(*form))
    return sharded.trusting() if trusted else sharded


def common_reader(
    config: commit.CheckpointingConfig,
    common_strategy: Selection[LoadCommonStrategy] = None,
    *,
    trusted: bool = False,
) -> LoadCommonStrategy:
    """The strategy for the common state alone, which needs no sharded backend."""
    form = config.common_backend, config.common_backend_version
    common: LoadCommonStrategy = _reading(StrategyAction.LOAD_COMMON, common_strategy, form)
    return common.trusting() if trusted else common


def _reading(action: StrategyAction, selection: Any, form: tuple[str, int]) -> Any:
    """The strategy that was chosen, or that of the format, which it must be able to read."""
    strategy = select_strategy(action, selection, form)
    strategy.check_backend_compatibility(form[0])
    strategy.check_version_compatibility(form[1])
    return strategy


@dataclass(slots=True, eq=False)
class OpenedCheckpoint:
    """A checkpoint that ranks load together; methods are collective.

    ``index`` holds what was asked for, ``stored_keys()`` the keys of all stored tensors;
    ``read_index`` sets them, and the reader. ``has_read`` says whether this rank has read values of
    tensors.
    """

    folder: Location
    save_number: int
    strategies: LoadStrategies
    common: CommonStateDict
    comm: Comm
    reader: StorageReader = field(init=False)
    index: Index = field(init=False)
    stored_keys: Callable[[], Iterable[str]] = field(init=False)
    has_read: bool = field(init=False, default=False)

    @classmethod
    def open(
        cls,
        checkpoint_dir: str | PathLike[str],
        sharded_strategy: Selection[LoadShardedStrategy],
        common_strategy: Selection[LoadCommonStrategy],
        comm: Comm,
        *,
        trusted: bool,
        split: Callable[[], T],
    ) -> tuple[OpenedCheckpoint, T]:
        """Find the strategies, read the common state, and call ``split``. Collective.

        If only rank 0 sees the checkpoint, the other ranks wait for it.
        """
        step = "opening the checkpoint"
        if "@" in str(checkpoint_dir):  # all ranks load the step that rank 0 finds
            root = as_location(checkpoint_dir).parent
            checkpoint_dir = root / comm.from_rank0(
                step, lambda: relative(located(as_location(checkpoint_dir)), root)
            )

        @paused_collector()
        def opened() -> tuple[OpenedCheckpoint, T]:
            folder = commit.data_folder(checkpoint_dir)
            # First: what another save begins to write afterwards must not pass for this checkpoint.
            save_number = number_of_save(folder)
            strategies = open_checkpoint(folder, sharded_strategy, common_strategy, trusted=trusted)
            common = strategies.common.load_common(folder)
            return cls(folder, save_number, strategies, common, comm), split()

        try:
            with comm.agreed(step):
                return opened()
        except CheckpointNotFoundError as error:
            rank0 = 0 if comm.global_ranks is None else comm.global_ranks[0]
            if comm.world_size == 1 or any(rank0 in finding.ranks for finding in error.findings):
                raise
        root = as_location(checkpoint_dir)
        with comm.agreed(step):
            if comm.rank and not is_seen(lambda: commit.is_committed(root) or is_database(root)):
                problem = "rank 0 sees a checkpoint here, and this rank does not"
                remedy = "Load from a file system that all ranks share, under the same path."
                finding = Finding(problem, path=str(root / CONFIG_FNAME), remedy=remedy)
                raise CheckpointNotFoundError("the ranks do not see the same folder", [finding])
            return opened()

    def is_unchanged(self) -> bool:
        """Whether no other save or removal has begun here since this was opened."""
        # An overwrite takes the commit back first, and notes itself once all is cleared.
        is_there = self.save_number == 0 or commit.is_committed(self.folder)
        return is_there and number_of_save(self.folder) == self.save_number

    def read_index(self, parts: StateDictParts, *, is_kept: bool, is_whole: bool) -> None:
        """Read the index: at least of what this rank asks for, all of it if ``is_whole``.

        ``is_kept`` says that the reader is used more than once.
        """
        strategy = self.strategies.sharded
        self.reader = strategy.make_reader(self.folder)
        self.reader.is_kept = is_kept
        shared = share_index(self.reader, self.comm)
        index = shared.whole
        if index is None:
            asked = {leaf.key for leaf in (*parts.tensors.values(), *parts.objects.values())}
            index = shared.index(None if is_whole else strategy.needed_keys(asked))
        self.index, self.stored_keys = index, shared.keys

    def stored_shapes(self) -> dict[str, tuple[Ints, torch.dtype]]:
        """Global shape and dtype of each stored tensor, read by rank 0."""
        metadata = self.comm.from_rank0(
            "reading the index", lambda: self.strategies.sharded.load_tensors_metadata(self.folder)
        )
        return {key: (tuple(leaf.global_shape), leaf.dtype) for key, leaf in metadata.items()}

    def object_keys(self) -> set[str]:
        """Keys of the sharded objects, listed by rank 0."""
        return self.comm.from_rank0(
            "listing the sharded objects",
            lambda: {leaf.key for leaf in self.strategies.objects(self.folder).values()},
        )

    def read_objects(
        self, objects: Mapping[TreePath, ShardedObject], parts: StateDictParts
    ) -> tuple[Mapping[TreePath, ShardedObject], Mapping[TreePath, Any]]:
        """The objects to read with the tensors; or the values of all, if they lie apart."""
        if handles_objects(self.strategies.sharded):
            if not objects:
                return {}, {}
            return replaced(objects, [leaf.without_data() for leaf in objects.values()]), {}
        with self.comm.agreed("reading the sharded objects"):
            values = self.strategies.common.load_sharded_objects(parts.nested(objects), self.folder)
            return {}, {path: value_at(values, path) for path in objects}

    def read(
        self, wanted: WantedTable, cells: Mapping[TreePath, ShardedObject], meter: Meter
    ) -> tuple[Mapping[TreePath, Any], Mapping[TreePath, Any]]:
        """Read tensors, and the objects that lie among them; the values of both."""

        def report(num_bytes: int) -> None:
            self.has_read = True
            meter.add(num_bytes)

        self.reader.report = report
        meter.expect(int(wanted.num_bytes.sum()))
        strategy, rows = self.strategies.sharded, wanted.with_objects(cells)
        read(rows, self.index, strategy.planner, self.reader, self.comm, strategy.plan_reader)
        return (
            replaced(wanted.leaves, [leaf.data for leaf in wanted.tensors]),
            replaced(cells, [leaf.data for leaf in cells.values()]),
        )


def replaced(leaves: Mapping[TreePath, Any], others: Sequence[Any]) -> Mapping[TreePath, Any]:
    """Other values at the same paths."""
    if isinstance(leaves, AtPaths):
        return leaves.replaced(others)
    return dict(zip(leaves, others, strict=True))
