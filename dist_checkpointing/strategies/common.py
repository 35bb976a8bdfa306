"""("torch", 1): the common state in ``common.pt``, sharded objects as ``KEY/shard_*.pt``.

Files are read with ``weights_only=True`` and an allow-list; a checkpoint never runs code.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

from dist_checkpointing.errors import CorruptCheckpointError, Finding, StateMismatchError
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.file_names import check_raw_key
from dist_checkpointing.format.foreign_formats import COMMON_STATE_FNAME, is_database
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import large_objects, require_backing
from dist_checkpointing.format.seal import SealedFile, known_files
from dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from dist_checkpointing.mapping.nested_dicts import flatten, unflatten
from dist_checkpointing.planning.load_plan import other_grid
from dist_checkpointing.strategies.base import KnownFormats, LoadCommonStrategy, SaveCommonStrategy
from dist_checkpointing.strategies.safe_pickle import deserialize, serialize

_MAX_COMMON_BYTES = 1 << 38


def _load(path: Location, *, trusted: bool) -> Any:
    return deserialize(location.read_bytes(path, _MAX_COMMON_BYTES), str(path), trusted=trusted)


def _object_file(leaf: ShardedObject, root: Location) -> Location | None:
    check_raw_key(leaf.key)
    path = root / f"{leaf.unique_key}.pt"
    if location.is_file(path):
        return path
    if len(leaf.global_shape) < 2:
        return None
    # Old writers took the last extent for a file suffix, and lost it.
    behind = replace(leaf, global_offset=(*leaf.global_offset[:-1], leaf.global_shape[-1]))
    older, further = (root / f"{cell.unique_key.rpartition('.')[0]}.pt" for cell in (leaf, behind))
    return older if location.is_file(older) and not location.is_file(further) else None


def _object_files(leaves: Collection[ShardedObject], root: Location) -> list[Location | None]:
    """The files of cells; one of another grid than others beside it may be of a late rank."""
    files, grids = [_object_file(leaf, root) for leaf in leaves], Counter[str]()
    for key in {leaf.key for leaf in leaves if isinstance(root, Path)}:
        names = filter(_is_cell, location.names_in(root / key))
        grids[key] = len({name.rpartition("_")[2] for name in names})
    if max(grids.values(), default=0) < 2:
        return files
    is_known = known_files(root)
    return [file if file and is_known(location.relative(file, root)) else None for file in files]


def _cells(names: Iterable[str], root: Location) -> list[ShardedObject]:
    """The cells that the names of files stand for, also where old writers lost an extent."""
    found = [
        ShardedObject.empty_from_unique_key(name.removesuffix(".pt"))
        for name in sorted(names, key=lambda name: name.split("/"))
        if "/" in name and location.is_file(root / name)
    ]
    last: Counter[str] = Counter()
    for leaf in found:
        if leaf.global_offset:
            last[leaf.key] = max(last[leaf.key], leaf.global_offset[-1] + 1)
    for leaf in found:
        if leaf.global_shape and leaf.global_shape[-1] == -1:
            leaf.global_shape = (*leaf.global_shape[:-1], last[leaf.key])
    return found


def _missing(leaves: Sequence[ShardedObject], root: Location) -> Iterator[Finding]:
    """The findings about cells that have no file: missing, or stored in another grid."""
    grids: dict[str, list[Ints]] = {}
    is_known = known_files(root)
    for leaf in leaves:
        if leaf.key not in grids:
            names = filter(_is_cell, location.names_in(root / leaf.key))
            cells = _cells(filter(is_known, (f"{leaf.key}/{name}" for name in names)), root)
            grids[leaf.key] = sorted({cell.global_shape for cell in cells})
        others = [grid for grid in grids[leaf.key] if grid != tuple(leaf.global_shape)]
        if others:
            stored = others[0] if len(others) == 1 else others
            yield other_grid(leaf, stored, path=str(root / leaf.key))
        else:
            path = str(root / f"{leaf.unique_key}.pt")
            yield Finding("not in the checkpoint", leaf.unique_key, path=path)


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes ``common.pt``, and a ``.pt`` file for each sharded object.

    Example:
        >>> from dist_checkpointing import load_common_state_dict, save
        >>> from dist_checkpointing.strategies.common import TorchCommonSaveStrategy
        >>> save({"step": 7}, "ckpt", common_strategy=TorchCommonSaveStrategy())
        >>> load_common_state_dict("ckpt")
        {'step': 7}
    """

    can_handle_sharded_objects = True

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)
        self.durability = local_folder.Durability.FSYNC

    def lasting(self, durability: local_folder.Durability) -> Self:
        strategy = copy.copy(self)
        strategy.durability = durability
        return strategy

    def created_names(self, object_keys: Iterable[str]) -> Iterable[str]:
        keys = list(object_keys)
        for key in keys:
            check_raw_key(key)
        return [COMMON_STATE_FNAME, *keys]

    def save_common(
        self, common_state_dict: StateDict, checkpoint_dir: str | PathLike[str]
    ) -> Sequence[SealedFile]:
        data = serialize(common_state_dict, "the common state")
        root = as_location(checkpoint_dir)
        return [SealedFile.put(root, COMMON_STATE_FNAME, data, self.durability)]

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | PathLike[str]
    ) -> Sequence[SealedFile]:
        root = as_location(checkpoint_dir)
        leaves, _ = flatten(sharded_objects_state_dict)
        sealed = []
        for leaf in leaves.values():
            if is_main_replica(leaf.replica_id):
                data = serialize(leaf.data, f"the ShardedObject {leaf.key!r}")
                sealed.append(SealedFile.put(root, f"{leaf.unique_key}.pt", data, self.durability))
        if self.durability is local_folder.Durability.FSYNC:
            location.fsync_folders([file.name for file in sealed], root, to_root=True)
        return sealed


class TorchCommonLoadStrategy(KnownFormats, LoadCommonStrategy):
    """Reads what TorchCommonSaveStrategy and every Megatron release with a ``common.pt`` wrote.

    Example:
        >>> from dist_checkpointing import save
        >>> from dist_checkpointing.strategies.common import TorchCommonLoadStrategy
        >>> save({"step": 7}, "ckpt")
        >>> TorchCommonLoadStrategy().load_common("ckpt")
        {'step': 7}
    """

    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({("torch", 1)})
    can_handle_sharded_objects = True

    def file_names(
        self, leaves: Iterable[ShardedObject], checkpoint_dir: str | PathLike[str]
    ) -> Iterable[str]:
        root = as_location(checkpoint_dir)
        found = _object_files([*leaves], root)
        return [COMMON_STATE_FNAME, *(location.relative(file, root) for file in found if file)]

    def load_common(self, checkpoint_dir: str | PathLike[str]) -> StateDict:
        path = as_location(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            common = _load(path, trusted=self.trusted)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if is_database(path.parent):
                return {}
            finding = Finding("missing", path=str(path), remedy="Use another checkpoint.")
            raise CorruptCheckpointError(f"Common file {path} does not exist", [finding]) from error
        if not isinstance(common, dict):
            finding = Finding("not a dict", found=type(common).__name__, path=str(path))
            raise CorruptCheckpointError("the common state is damaged", [finding])
        return common

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | PathLike[str]
    ) -> StateDict:
        leaves, skeleton = flatten(sharded_objects_state_dict)
        root = as_location(checkpoint_dir)
        files = dict(zip(leaves, _object_files(leaves.values(), root), strict=True))
        missing = [leaves[path] for path, file in files.items() if file is None]
        findings = list(_missing(missing, root)) if missing else []
        message = "Object shard not found" if len(findings) == 1 else "Object shards not found"
        StateMismatchError.raise_if(findings, message)
        values = {path: _load(file, trusted=self.trusted) for path, file in files.items() if file}
        result: StateDict = unflatten(skeleton, values)
        return result

    def load_sharded_metadata(self, checkpoint_dir: str | PathLike[str]) -> ShardedStateDict:
        root = as_location(checkpoint_dir)
        names = filter(known_files(root), location.files_below(root))
        found = _cells((n for n in names if _is_cell(n.rpartition("/")[2])), root)
        # A name may speak of a large grid where few cells have a file.
        cells = Counter((leaf.key, tuple(leaf.global_shape)) for leaf in found)
        files = {key: number for (key, _), number in cells.items()}
        stated = large_objects(dict(cells.keys()))
        require_backing(stated, lambda size: (0, files[size.key], str(root / size.key)))
        return {leaf.unique_key: leaf for leaf in found}


def _is_cell(name: str) -> bool:
    return fnmatchcase(name, "shard_*.pt")
