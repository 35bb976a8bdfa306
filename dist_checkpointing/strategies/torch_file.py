"""Files of torch.save: slices of tensors in the mapped file, and files with room for tensors."""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from dist_checkpointing.errors import CheckpointingException, Finding, UnsupportedFormatError
from dist_checkpointing.format.checksums import bytes_of
from dist_checkpointing.format.geometry import Box, Ints, Window
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.seal import SealedFile
from dist_checkpointing.mapping import StateDict, tensor_memory
from dist_checkpointing.mapping.nested_dicts import MISSING, flatten, mapped
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.storage.interface import StorageWriter, WriteResult, WriteResults, done
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies import tensor_files
from dist_checkpointing.strategies.base import (
    PathOrStr,
    PlannedLoadStrategy,
    PlannedSaveStrategy,
    SaveCommonStrategy,
)
from dist_checkpointing.strategies.data_files import write_window
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.torch_archives import entries
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)

BACKEND: Final = "torch_file"
COMMON_KEY: Final = "__common__"
"""Where a file that was converted from a checkpoint keeps the common state."""

OBJECTS_KEY: Final = "__objects__"
"""Likewise, of the sharded objects: ``{key: {cell: value}}``."""

_ONLY_KEY = "tensor"
_FILE_NAME = "state.pt"
_DTYPES = frozenset(row.torch for row in tensor_memory.DTYPES)


_Content = tuple[dict[str, torch.Tensor], dict[str, dict[Ints, Any]], dict[Any, Any]]
"""Tensors by path, sharded objects cell by cell, and the rest."""


class TorchFile(tensor_files.TensorFiles):
    """A file of torch.save: its tensors by path, joined by dots; the rest is common state.

    Args:
        path: the file.
        trusted: unpickle anything in it, each time that it is mapped.

    Raises:
        UnsupportedFormatError: if it holds more than plain data and is not trusted.
        CorruptCheckpointError: if it is damaged.
    """

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        super().__init__(path, [path])
        self._trusted = trusted
        tensors, self.cells, self.common = self._content(path)
        self._set_index(
            (key, tensor_memory.from_torch(tensor.dtype), tensor.shape)
            for key, tensor in tensors.items()
        )

    def _open(self, file: Path) -> _Content:
        content = deserialize(file, trusted=self._trusted)
        if isinstance(content, torch.Tensor):
            content = {_ONLY_KEY: content}
        if not isinstance(content, dict):
            finding = Finding("expected a dict", found=type(content).__name__, path=str(file))
            raise CheckpointingException("not a file of tensors", [finding])
        content = dict(content)
        common = content.pop(COMMON_KEY) if isinstance(content.get(COMMON_KEY), dict) else {}
        cells = content.pop(OBJECTS_KEY) if _are_objects(content.get(OBJECTS_KEY)) else {}
        tensors: dict[str, torch.Tensor] = {}
        for path, leaf in flatten(content)[0].items():
            if not _is_storable(leaf):
                continue
            key = ".".join(str(step) for step, _ in path)
            if key in tensors:
                finding = Finding("two tensors have this path", key, path=str(file))
                raise CheckpointingException("tensors cannot be distinguished", [finding])
            tensors[key] = leaf.detach()
        rest = mapped(content, lambda leaf: MISSING if _is_storable(leaf) else leaf)
        return tensors, cells, common | rest

    def _copy(self, key: str, box: Box, out: torch.Tensor) -> None:
        out.copy_(self._content(self.path)[0][key][box.slices()])


class TorchFileReader(tensor_files.TensorFilesReader):
    """Reads a file of torch.save."""

    files_type: ClassVar[type[TorchFile]] = TorchFile


class TorchFileWriter(StorageWriter):
    """Writes a file that ``torch.load(weights_only=True)`` reads, from one process.

    ``common`` is what the file holds beside tensors and objects.
    """

    layout: RowBlockLayout = RowBlockLayout(keeps_ranges=False)
    keeps_cuts: ClassVar[bool] = False
    keeps_fingerprints: ClassVar[bool] = False
    common: Mapping[Any, Any] = {}

    def created_names(self, index: Index, *, world_size: int) -> Iterable[str]:
        if world_size > 1:
            remedy = "Save with tensorstore, and make a file of it: dckpt convert A B.pt."
            finding = Finding("one process writes it", found=f"{world_size} ranks", remedy=remedy)
            raise UnsupportedFormatError("ranks cannot save a file of torch.save", [finding])
        return [_FILE_NAME]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        table, index, data_of = plan.table, plan.index, planner.data_of(plan)
        assert index is not None
        cells: dict[str, dict[Ints, Any]] = {}
        for row in np.flatnonzero(table.is_object).tolist():
            cells.setdefault(table.key(row), {})[table.box(row).offset] = data_of(row)
        rows = [(key, index[key].dtype, index[key].global_shape) for key in index]
        path = self.checkpoint_dir / _FILE_NAME
        starts = create(path, rows, self.common, cells)

        def write(row: int) -> None:
            key, data = table.key(row), data_of(row)
            assert isinstance(data, torch.Tensor)
            values = tensor_memory.as_numpy(data.detach().to("cpu").contiguous())
            window = Window(0, table.global_shape(row), table.box(row))
            write_window(file.fileno(), starts[key], window, values)
            self.report(int(table.num_bytes[row]))

        with path.open("r+b") as file:
            in_threads(write, np.flatnonzero(~table.is_object).tolist(), self.options.threads)
            if self.options.durability is Durability.FSYNC:
                os.fsync(file.fileno())
        written = SealedFile(_FILE_NAME, path.stat().st_size)
        return done(WriteResults(table, table.num_bytes, files=(written,)))

    def finish(self, metadata: Index, results: Sequence[Sequence[WriteResult]]) -> None:
        self.commit_file: tuple[str, bytes | None] | None = _FILE_NAME, None


class TorchFileSaveShardedStrategy(PlannedSaveStrategy):
    """Saves the state of one process as a file of torch.save, as ("torch_file", 1).

    Tensors have their keys. Objects and common state, if there are any, are in it as
    ``__objects__`` and ``__common__``.

    Example:
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        >>> save(state, "model.pt", "torch_file")
        >>> torch.load("model.pt")
        {'w': tensor([1., 1.])}
    """

    writer_type: ClassVar[type[TorchFileWriter]] = TorchFileWriter
    writes: ClassVar[tuple[str, int]] = (BACKEND, 1)
    can_handle_sharded_objects = True

    def is_one_file(self, path: PathOrStr) -> bool:
        return True

    def holdable(
        self, path: PathOrStr, common_state_dict: StateDict, objects: Mapping[str, Any]
    ) -> tuple[StateDict, Mapping[str, Any]]:
        return loadable(common_state_dict), loadable(objects)

    def common_strategy(
        self, writer: StorageWriter, common_state_dict: StateDict
    ) -> SaveCommonStrategy:
        assert isinstance(writer, TorchFileWriter)
        writer.common = loadable(common_state_dict)
        lost = sorted(common_state_dict.keys() - writer.common.keys())
        findings = [Finding("torch.load would refuse it", str(name)) for name in lost]
        UnsupportedFormatError.raise_if(findings, "this cannot be kept in a file of torch.save")
        return tensor_files.NoCommonFiles(BACKEND, 1)


class TorchFileLoadShardedStrategy(PlannedLoadStrategy):
    """Loads files of torch.save, as ("torch_file", 1).

    Example:
        >>> torch.save({"w": torch.ones(2)}, "model.pt")
        >>> template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
        >>> load(template, "model.pt")
        {'w': tensor([1., 1.])}
    """

    reader_type: ClassVar[type[TorchFileReader]] = TorchFileReader
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({(BACKEND, 1)})
    can_handle_sharded_objects = True


class TorchFileCommonLoadStrategy(tensor_files.TensorFilesCommonStrategy):
    """Reads what a file of torch.save holds beside tensors."""

    files_type: ClassVar[type[TorchFile]] = TorchFile
    reads: ClassVar[frozenset[tuple[str, int]]] = frozenset({(BACKEND, 1)})


def _are_objects(value: object) -> bool:
    """Whether a value is what ``OBJECTS_KEY`` holds: full grids of cells by key."""
    return isinstance(value, dict) and all(
        isinstance(key, str)
        and isinstance(cells, dict)
        and all(isinstance(c, tuple) and all(type(i) is int and i >= 0 for i in c) for c in cells)
        and len({len(cell) for cell in cells}) == 1
        and math.prod(tensor_files.extents(cells)) == len(cells)
        for key, cells in value.items()
    )


def _is_storable(leaf: object) -> bool:
    """Whether a leaf is a tensor that a checkpoint can hold; others stay in the common state."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and leaf.dtype in _DTYPES
        and not leaf.is_meta
    )


def create(
    path: Path,
    rows: Sequence[tensor_files.TensorRow],
    common: Mapping[Any, Any],
    objects: Mapping[str, Any],
) -> dict[str, int]:
    """Create a file that ``torch.load(weights_only=True)`` reads, with room for the tensors.

    Returns at which byte the values of each tensor begin, in C order.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in rows]
    # Memory that nobody touches is never taken.
    state: dict[str, Any] = {
        key: tensor_memory.as_tensor(np.empty(shape, dtype.bits), dtype.torch)
        for key, dtype, shape in rows
    }
    tensors: list[torch.Tensor] = []

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf.detach().cpu())
        # Of one that repeats its values the copy is made when it is written, and not all at once.
        return torch.empty(leaf.shape, dtype=leaf.dtype)

    for name, value in ((COMMON_KEY, common), (OBJECTS_KEY, objects)):
        if value and name in state:
            finding = Finding("is where the rest is kept", name, remedy="--rename it.")
            raise CheckpointingException("a tensor cannot have this key", [finding])
        if value:
            state[name] = mapped(value, copied)
    with torch.serialization.skip_data():
        torch.save(state, path)
    with path.open("r+b") as file:
        # torch.save numbers storages in the order in which it meets their tensors.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as archive:
            found = entries(archive)
        records = [found[f"data/{number}"] for number in range(len(rows) + len(tensors))]
        expected = [*sizes, *(tensor.nbytes for tensor in tensors)]
        assert [size for _, size in records] == expected, "torch.save wrote other storages"
        for tensor, (start, _) in zip(tensors, records[len(rows) :], strict=True):
            file.seek(start)
            file.write(bytes_of(tensor_memory.as_numpy(tensor)))
    return {key: start for (key, *_), (start, _) in zip(rows, records, strict=False)}


def loadable(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """What of some values ``torch.load(weights_only=True)`` reads."""
    return {name: value for name, value in values.items() if _is_loadable({name: value})}


def _is_loadable(value: Any) -> bool:
    tensors = [leaf for leaf in flatten(value)[0].values() if isinstance(leaf, torch.Tensor)]
    others = mapped(value, lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf)
    buffer = io.BytesIO()
    try:
        torch.save(others, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever a pickle of anything raises
        logger.debug("cannot be kept in a file of torch.save: %s", error)
        return False
    # A tensor inside a leaf would end up in the file without its values.
    hidden = [name for name in zipfile.ZipFile(buffer).namelist() if "/data/" in name]
    return not hidden and all(map(_is_storable, tensors))
