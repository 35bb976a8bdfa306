"""Which strategy a caller means with a name, a (name, version), an object, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias, TypeVar, Union

from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import CheckpointingConfig, read_config
from dist_checkpointing.mapping import ShardedObject
from dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveStrategyBase,
    handles_objects,
    lacks,
)
from dist_checkpointing.strategies.registry import (
    StrategyAction,
    get_default_strategy,
    kind_of,
    newest_version,
)
from dist_checkpointing.strategies.unplanned_strategies import as_planned

S = TypeVar("S")

Selection: TypeAlias = Union[S, str, tuple[str, int], None]  # noqa: UP007 - S | str is no alias
"""A strategy, the name of a backend, its name and version, or None for the default."""

DEFAULT_SHARDED = ("tensorstore", 1)
DEFAULT_COMMON = ("torch", 1)


def select_strategy(
    action: StrategyAction,
    selection: Any,
    default: tuple[str, int] | None = None,
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
    kind = kind_of(action)
    if not isinstance(selection, kind):
        finding = Finding(
            "not a strategy for this",
            expected=f"{kind.__name__}, a backend name or (name, version)",
            found=type(selection).__name__,
        )
        raise CheckpointingException(f"cannot {action.value} with {selection!r}", [finding])
    _require_complete(selection)
    return selection


def _require_complete(strategy: Any) -> None:
    """Refuse a class that is not finished now, and not in the middle of a save."""
    if isinstance(strategy, SaveStrategyBase):
        for name in ("backend", "version"):
            if not hasattr(strategy, name):
                raise lacks(strategy, name, "super().__init__(backend, version) sets")
    for kind, maker, name in (
        (PlannedSaveStrategy, "make_writer", "writer_type"),
        (PlannedLoadStrategy, "make_reader", "reader_type"),
    ):
        is_own = getattr(type(strategy), maker, None) is not getattr(kind, maker)
        if isinstance(strategy, kind) and not is_own and not hasattr(strategy, name):
            raise lacks(strategy, name, f"{maker} needs")


@dataclass(frozen=True, slots=True)
class LoadStrategies:
    """What reads a checkpoint."""

    config: CheckpointingConfig
    sharded: PlannedLoadStrategy
    common: LoadCommonStrategy

    def object_keys(self, checkpoint_dir: Location) -> set[str]:
        """Keys of the sharded objects."""
        strategy = self.sharded if handles_objects(self.sharded) else self.common
        metadata = strategy.load_sharded_metadata(checkpoint_dir)
        return {leaf.key for leaf in metadata.values() if isinstance(leaf, ShardedObject)}


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
    config = read_config(checkpoint_dir)
    backend, version = config.sharded_backend, config.sharded_backend_version
    sharded: LoadShardedStrategy = select_strategy(
        StrategyAction.LOAD_SHARDED, sharded_strategy, (backend, version)
    )
    sharded.check_backend_compatibility(backend)
    sharded.check_version_compatibility(version)
    planned = as_planned(sharded.for_format(backend, version))
    common = common_reader(config, common_strategy, trusted=trusted)
    return LoadStrategies(config, planned.trusting() if trusted else planned, common)


def common_reader(
    config: CheckpointingConfig,
    common_strategy: Selection[LoadCommonStrategy] = None,
    *,
    trusted: bool = False,
) -> LoadCommonStrategy:
    """The strategy for the common state alone, which needs no sharded backend."""
    backend, version = config.common_backend, config.common_backend_version
    common: LoadCommonStrategy = select_strategy(
        StrategyAction.LOAD_COMMON, common_strategy, (backend, version)
    )
    common.check_backend_compatibility(backend)
    common.check_version_compatibility(version)
    return common.trusting() if trusted else common
