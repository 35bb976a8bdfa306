"""The common state of checkpoints without ``common.pt``: it is inside, among the values."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, Self

from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.ranged_reads import open_file
from dist_checkpointing.mapping import ShardedStateDict, StateDict
from dist_checkpointing.strategies.base import LoadCommonStrategy
from dist_checkpointing.strategies.planned import KnownFormats
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.torch_archive import BadRecord
from dist_checkpointing.strategies.torch_dist.contents import COMMON_STATE_CELL, cell_named
from dist_checkpointing.strategies.torch_dist.metadata import (
    DcpMetadata,
    StatePath,
    read_dcp_metadata,
)
from dist_checkpointing.strategies.torch_dist.stored_values import OpenRecord, read_object

_MOST_POSITIONS = 1 << 24


class TorchDistCommonLoadStrategy(KnownFormats, LoadCommonStrategy):
    """Reads the common state that Megatron-Core >= 0.19 and plain torch DCP keep in the checkpoint.

    Megatron's is one object. Plain DCP's is every value that is not a tensor, nested as it was in
    the state dict that was saved.

    Args:
        trusted: unpickle anything, which lets the files run any code.

    Example:
        >>> TorchDistCommonLoadStrategy().check_backend_compatibility("torch_dist")
    """

    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("torch_dist", 1)})
    argument = "common_strategy"

    def __init__(self, *, trusted: bool = False) -> None:
        self.trusted = trusted

    def trusting(self) -> Self:
        return type(self)(trusted=True)

    def load_common(self, checkpoint_dir: str | PathLike[str]) -> StateDict:
        folder = as_location(checkpoint_dir)
        metadata = read_dcp_metadata(folder)
        if COMMON_STATE_CELL in metadata.values:
            common = self._read(folder, metadata, COMMON_STATE_CELL, listed=True)
            if not isinstance(common, dict):
                finding = Finding("not a dict", COMMON_STATE_CELL, found=type(common).__name__)
                raise CorruptCheckpointError("the common state is damaged", [finding])
            return common
        plain = [key for key in metadata.values if cell_named(key) is None]
        return nested(
            {
                metadata.paths.get(key, (key,)): self._read(folder, metadata, key, listed=False)
                for key in plain
            }
        )

    def _read(self, folder: Location, metadata: DcpMetadata, key: str, *, listed: bool) -> Any:
        place = metadata.places.get((key, None))
        if place is None:
            finding = Finding("an object is stored nowhere", key, path=str(folder))
            raise CorruptCheckpointError("the common state is damaged", [finding])
        where = f"{folder / place.file}, bytes from {place.offset} on ({key!r})"
        try:
            with open_file(folder, place.file) as file:
                record = OpenRecord(file, place)
                if listed:
                    return read_object(record, where, trusted=self.trusted)
                return deserialize(record.read(0, record.length), where, trusted=self.trusted)
        except (BadRecord, FileNotFoundError, NotADirectoryError, EOFError) as error:
            finding = Finding(f"cannot be read: {error}", key, path=where)
            raise CorruptCheckpointError("the common state is damaged", [finding]) from error

    def load_sharded_objects(
        self,
        sharded_objects_state_dict: ShardedStateDict,
        checkpoint_dir: str | PathLike[str],
    ) -> StateDict:
        del sharded_objects_state_dict
        finding = Finding(
            "its sharded objects lie among the tensors",
            path=str(checkpoint_dir),
            remedy="Leave sharded_strategy out: the one for torch_dist reads both.",
        )
        raise UnsupportedFormatError("cannot read the sharded objects", [finding])


ABSENT: Any = object()
"""A value that is stored elsewhere, and only keeps its position in a list."""


def nested(values: Mapping[StatePath, Any]) -> dict[Any, Any]:
    """Values by path as a nest of dicts and lists.

    Positions become those of a list. What DCP stored elsewhere (the tensors) leaves None there,
    as in the common state of every other checkpoint.

    Raises:
        StateMismatchError: if one path goes through the value at another.
        CorruptCheckpointError: if the lists are longer than those of any state dict.
    """
    tree = _Nest()
    for path, value in values.items():
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, _Nest())
            if not isinstance(node, _Nest):
                raise _crossing(path)
        if path[-1] in node:
            raise _crossing(path)
        node[path[-1]] = value
    # What a file says is not yet memory: one number may ask for more than there is.
    length = sum(map(_list_positions, tree.values()))
    if length > _MOST_POSITIONS:
        finding = Finding("lists longer than those of any state dict", found=f"{length} positions")
        raise CorruptCheckpointError("the values in the checkpoint cannot be nested", [finding])
    return _present(tree)


class _Nest(dict[Any, Any]):
    """A container on the way; no value that was stored."""


def _crossing(path: StatePath) -> StateMismatchError:
    finding = Finding("two values at one place", ".".join(map(str, path)))
    return StateMismatchError("the values in the checkpoint cannot be nested", [finding])


def _is_list(branch: _Nest) -> bool:
    return all(type(step) is int for step in branch)


def _list_positions(value: Any) -> int:
    """How long all lists are together that ``_rebuilt`` makes of a value."""
    if not isinstance(value, _Nest):
        return 0
    own = max(value) + 1 if _is_list(value) else 0
    return own + sum(map(_list_positions, value.values()))


def _present(branch: _Nest) -> dict[Any, Any]:
    rebuilt = ((step, _rebuilt(child)) for step, child in branch.items())
    return {step: value for step, value in rebuilt if value is not ABSENT}


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, _Nest):
        return value
    below = _present(value)
    if not below:
        return ABSENT
    if _is_list(value):
        return [below.get(position) for position in range(max(value) + 1)]
    return below
