"""DCPReader: ``dcp.load`` from our checkpoints; DCP's names of values.

DCP flattens: its checkpoint is a dict of names. We keep the nesting of common state. DCPWriter
writes the path of each name into ``.dckpt/dcp.json``; in checkpoints without that file, the names
follow from the nesting, by DCP's rules.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    metadata as dcp_metadata,
    planner as dcp,
    storage as dcp_storage,
)
from torch.futures import Future

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CorruptCheckpointError,
    Finding,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import check_is_distributed_checkpoint, data_folder
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from dist_checkpointing.mapping.nested_dicts import flatten
from dist_checkpointing.mapping.tensor_memory import overlaps_itself
from dist_checkpointing.planning.planners import saved_stream
from dist_checkpointing.storage.driver import read
from dist_checkpointing.strategies.base import LoadShardedStrategy, handles_objects
from dist_checkpointing.strategies.selection import Selection, open_checkpoint
from dist_checkpointing.strategies.torch_dist.metadata import StatePath
from dist_checkpointing.strategies.torch_dist.reader import ABSENT, nested
from dist_checkpointing.validation.load_errors import overlap_finding

DCP_KEYS_NAME = ".dckpt/dcp.json"
_FORMAT = "dist_checkpointing.dcp_keys"
_MAX_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class DCPKeys:
    """The names of a DCP checkpoint: the path of each in the nested state dict, the names of values
    that are not tensors, and those of values whose bytes ``torch.load`` does not read (``raw``),
    which are stored as bytes.
    """

    paths: Mapping[str, StatePath]
    values: tuple[str, ...]
    raw: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, names: Iterable[str], values: Iterable[str], raw: Iterable[str], planner_data: object
    ) -> DCPKeys:
        """The names of a save; ``planner_data`` has paths by name, as DCP's default planner has
        them. If the planner has anything else there, every name becomes a key of the outermost
        dict.
        """
        noted = planner_data if isinstance(planner_data, Mapping) else {}
        paths = {name: _path(noted.get(name)) or (name,) for name in names}
        if not _fit_together(paths.values()):
            paths = {name: (name,) for name in paths}
        return cls(paths, tuple(values), tuple(raw))

    def nest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values at their paths; in lists, None replaces a tensor."""
        return nested({path: values.get(name, ABSENT) for name, path in self.paths.items()})

    def write(self, folder: Path, durability: local_folder.Durability) -> None:
        content = {
            "format": _FORMAT,
            "paths": {name: list(path) for name, path in self.paths.items()},
            "values": self.values,
            "raw": self.raw,
        }
        path = folder / DCP_KEYS_NAME
        path.parent.mkdir(exist_ok=True)
        data = json.dumps(content, separators=(",", ":")).encode()
        local_folder.write_atomic(path, data, durability)

    @classmethod
    def read(cls, folder: Location) -> DCPKeys | None:
        """The names in the file of a checkpoint; None if it has none, CorruptCheckpointError if
        damaged.
        """
        path = folder / DCP_KEYS_NAME
        if not location.is_file(path):
            return None
        with local_folder.parsing("DCP's names cannot be read", path):
            content = location.read_json(path, _MAX_BYTES)
            paths = {name: _path(steps) for name, steps in content["paths"].items()}
            values, raw = (tuple(content[name]) for name in ("values", "raw"))
            if content["format"] != _FORMAT or None in paths.values():
                raise ValueError("not the names of a DCP checkpoint")
            if not paths.keys() >= {*values} >= {*raw}:
                raise ValueError("values without a path")
        return cls({name: steps for name, steps in paths.items() if steps}, values, raw)


def _walk(value: Any, path: StatePath, above: set[str]) -> Iterator[tuple[StatePath, Any]]:
    """Path that DCP would give it, and value, of everything in the common state of a checkpoint
    that DCP has not written. A list that held a tensor counts as flattened: its name is ``above``
    that of a tensor, which None replaces.
    """
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _walk(child, (*path, str(key)), above)
        return
    name = ".".join(map(str, path))
    if isinstance(value, list) and _is_opened(value, name, above):
        for index, child in enumerate(value):
            if child is not None or f"{name}.{index}" not in above:
                yield from _walk(child, (*path, index), above)
        return
    yield path, value


def _is_opened(value: list[Any], name: str, above: set[str]) -> bool:
    return any(
        isinstance(child, Mapping)
        or f"{name}.{index}" in above
        or (isinstance(child, list) and _is_opened(child, f"{name}.{index}", above))
        for index, child in enumerate(value)
    )


def _path(steps: object) -> StatePath | None:
    if not isinstance(steps, list | tuple) or not steps:
        return None
    # A number is a position in a list. A limit keeps a hostile file from asking for a huge list.
    fits = all(type(s) is str or (type(s) is int and 0 <= s < 1 << 24) for s in steps)
    return tuple(steps) if fits else None


def _fit_together(paths: Iterable[StatePath]) -> bool:
    """Whether no path is the beginning of another, and no container is both a list and a dict."""
    leaves = list(paths)
    kinds: dict[StatePath, type] = {(): str}  # the outermost container is a dict
    for path in leaves:
        for depth, step in enumerate(path):
            if kinds.setdefault(path[:depth], type(step)) is not type(step):
                return False
    return len(set(leaves)) == len(leaves) and not kinds.keys() & set(leaves)


class DCPReader(dcp_storage.StorageReader):
    """A storage for ``torch.distributed.checkpoint.load``: it reads checkpoints of this library.

    To DCP, every tensor is one chunk, so DCP plans few items; this reader finds the stored chunks
    that fill them. As in DCP, a tensor of another dtype is converted.

    Common state has the names that DCP gives it when it flattens a state dict. A sharded object has
    its unique key (``key/shard_0_1``).

    Args:
        path: folder or URL of a committed checkpoint; ``checkpoint_id`` of ``dcp.load`` replaces
            it.
        backend: backend name, (name, version), or a strategy; by default the one that the
            checkpoint names.
        trusted: unpickle anything in common state and objects. Lets the checkpoint run any code.

    Example:
        >>> from torch.distributed import checkpoint as dcp
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, "ckpt/17")
        >>> state = {"w": torch.zeros(3)}
        >>> dcp.load(state, storage_reader=DCPReader("ckpt/17"))
        >>> state["w"]
        tensor([1., 1., 1.])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        backend: Selection[LoadShardedStrategy] = None,
        *,
        trusted: bool = False,
    ) -> None:
        super().__init__()
        self.path = self._folder = as_location(path)
        self.trusted = trusted
        self._backend = backend

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether ``checkpoint_id`` is a folder with a committed checkpoint."""
        if not isinstance(checkpoint_id, str | os.PathLike):
            return False
        try:
            return check_is_distributed_checkpoint(checkpoint_id)
        except UnsupportedFormatError:  # a URL of another scheme
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = as_location(checkpoint_id)

    # Without **kwargs: with it, DCP would look for metadata of each rank too.
    def read_metadata(self) -> dcp_metadata.Metadata:
        """What the checkpoint holds, as metadata of DCP.

        Raises:
            CheckpointNotFoundError: if the folder holds no committed checkpoint.
            UnsupportedFormatError: if two values have one name.
            CorruptCheckpointError: if something is missing or damaged.
        """
        self._folder = data_folder(self.path)
        self._found = found = open_checkpoint(self._folder, self._backend, trusted=self.trusted)
        self._reader = found.sharded.make_reader(self._folder)
        self._index = self._reader.read_metadata()
        named, paths = self._named_values(found.common.load_common(self._folder))
        self._objects = found.objects(self._folder)
        self._values = dict(named)
        counts = Counter([*self._index, *(name for name, _ in named), *self._objects])
        problem, path = "several tensors, values or objects have this name", str(self.path)
        remedy = "Load it with dist_checkpointing.load, which distinguishes them."
        findings = [
            Finding(problem, name, path=path, remedy=remedy)
            for name, count in counts.items()
            if count > 1
        ]
        UnsupportedFormatError.raise_if(findings, "in DCP, a name belongs to one value")
        described: dict[str, Any] = {key: _described(self._index, key) for key in self._index}
        in_bytes = dcp_metadata.BytesStorageMetadata()
        described |= dict.fromkeys([*self._values, *self._objects], in_bytes)
        return dcp_metadata.Metadata(
            described, planner_data={name: paths.get(name, (name,)) for name in described}
        )

    def _named_values(self, state: Any) -> tuple[list[tuple[str, Any]], Mapping[str, StatePath]]:
        """Names and values of everything in common state, and the known paths."""
        keys = DCPKeys.read(self._folder)
        self._raw = frozenset(() if keys is None else keys.raw)
        if keys is None:
            parts = (key.split(".") for key in self._index)
            above = {name for own in parts for name in accumulate(own, "{}.{}".format)}
            found = [(".".join(map(str, p)), p, v) for p, v in _walk(state, (), above)]
            return [(name, v) for name, _, v in found], {name: path for name, path, _ in found}
        try:
            named = [(name, reduce(getitem, keys.paths[name], state)) for name in keys.values]
            odd = sorted(n for n, v in named if n in self._raw and not isinstance(v, bytes))
            if odd:
                raise TypeError(f"{odd} are not bytes")
        except (KeyError, IndexError, TypeError) as error:
            problem = f"{DCP_KEYS_NAME} does not fit the common state: {error!r}"
            finding = Finding(problem, path=str(self.path))
            raise CorruptCheckpointError("the checkpoint contradicts itself", [finding]) from error
        return named, keys.paths

    def set_up_storage_reader(
        self, metadata: dcp_metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: each rank has read the metadata."""

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        filled: list[tuple[dcp.ReadItem, torch.Tensor]] = []
        leaves: list[ShardedBase] = []
        objects: dict[str, ShardedObject] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is not dcp.LoadItemType.BYTE_IO:
                tensor = planner.resolve_tensor(item).detach()
                if overlaps_itself(tensor):
                    finding = overlap_finding(name, tensor)
                    raise StateMismatchError("a tensor cannot be filled", [finding])
                whole = self._index[name].global_shape
                box = tuple(item.lengths), whole, tuple(item.storage_offsets)
                leaves.append(ShardedTensor(name, tensor, tensor.dtype, *box, None))
                filled.append((item, tensor))
            elif name in self._objects:
                objects[name] = self._objects[name].without_data()
        strategy = self._found.sharded
        own_objects: dict[str, ShardedObject] = objects if handles_objects(strategy) else {}
        by_path, _ = flatten([*leaves, *own_objects.values()])
        # Every rank reads by itself: DCP does what needs all ranks.
        read(by_path, self._index, strategy.planner, self._reader, SingleProcess())
        values = {name: leaf.data for name, leaf in own_objects.items()}
        if objects and not own_objects:
            values = self._found.common.load_sharded_objects(dict(objects), self._folder)
        for item, tensor in filled:
            planner.commit_tensor(item, tensor)
        for item in plan.items:
            if item.type is dcp.LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                value: Any = values[name] if name in values else self._values[name]
                # As bytes that DCP's planners can load.
                stream = io.BytesIO(value) if name in self._raw else saved_stream(value)
                planner.load_bytes(item, stream)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _described(index: Index, key: str) -> dcp_metadata.TensorStorageMetadata:
    stored = index[key]
    size = torch.Size(stored.global_shape)
    whole = dcp_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    properties = dcp_metadata.TensorProperties(dtype=stored.dtype.torch)
    return dcp_metadata.TensorStorageMetadata(properties, size, [whole])
