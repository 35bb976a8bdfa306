"""Writes what was planned, whole or not at all and never over what is there.

Into files with room for it, by a few threads that each hold one batch of boxes at a time; or by an
ordinary save, whose planner reads from the source.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER
from dist_checkpointing.filesystem.locks import LOCK_NAME, FolderLock
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.object_store_locks import CLAIMS
from dist_checkpointing.format.checksums import bytes_of
from dist_checkpointing.format.commit import DATA, check_is_distributed_checkpoint
from dist_checkpointing.format.geometry import Box, ravel_offset
from dist_checkpointing.format.leftovers import attempt_of, leftovers
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.mapping import ShardedObject, ShardedTensor, tensor_memory
from dist_checkpointing.planning import DefaultSavePlanner, MetadataIndex, SavePlan, WriteItem
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.storage.fingerprints import fingerprints_by_reading
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies import safetensors_folder, torch_file
from dist_checkpointing.strategies.base import PlannedSaveStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.strategies.tensor_files import TensorFiles, TensorRow
from dist_checkpointing.threads import in_threads
from dist_checkpointing.tools.convert.plan import (
    Budget,
    ConversionPlan,
    ConvertOptions,
    PlannedTensor,
    is_cut_across,
    runs,
    shards,
)
from dist_checkpointing.tools.convert.source import Source
from dist_checkpointing.tools.opening import OpenedFiles

_MOST_COPIED_TOGETHER = 512
_LARGE_BYTES = 2**20
_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 1024


_Copy = tuple[PlannedTensor, Box, int, int]
"""A box of a tensor, the file that it is copied to, and where in that the tensor begins."""


@dataclass(eq=False)
class Target(ABC):
    """One conversion: what is read, what is planned, and where it goes.

    ``left_out`` says what it cannot hold; ``stop``, when set, ends the conversion.
    """

    source: Source
    plan: ConversionPlan
    destination: Any
    options: ConvertOptions
    progress: ProgressOption | None
    tensors_only: bool
    left_out: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Refuse what cannot be held, and note what is left out."""

    @abstractmethod
    def write(self, budget: Budget) -> int:
        """Write all that is planned; the number of tensors proven to be those of the source."""

    @property
    def common(self) -> dict[Any, Any]:
        """The common state to convert."""
        return {} if self.tensors_only else self.source.opened.common

    @property
    def rows(self) -> list[TensorRow]:
        """The tensors to write."""
        return [(tensor.key, tensor.dtype, tensor.shape) for tensor in self.plan.tensors]

    def leave_out(self, what: str, names: Iterable[object], kept: Iterable[object] = ()) -> None:
        """Note the names that are not kept: the first of them."""
        kept = frozenset(kept)
        if lost := [str(name) for name in names if name not in kept]:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            self.left_out.append(f"{what} ({', '.join(lost[:5])}{more})")

    def read(self, wanted: Sequence[tuple[PlannedTensor, Box]]) -> Iterator[torch.Tensor]:
        """The values of boxes in their new dtypes, each cast when the one before is done with."""
        if self.stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        values = self.source.read([(tensor.source.key, box) for tensor, box in wanted])
        values.reverse()
        for tensor, _ in wanted:
            yield values.pop().to(tensor.dtype.torch)

    def prove(self, written: Checkpoint, budget: Budget) -> int:
        """Compare what was written with the fingerprints of the source; how many were compared.

        Those of tensors with another dtype differ. A format that keeps none is read again.
        """
        kept = self.source.index.fingerprints
        expected = {
            tensor.key: kept[tensor.source.key]
            for tensor in self.plan.tensors
            if tensor.dtype == tensor.source.dtype and tensor.source.key in kept
        }
        target = Source(written)
        target.limit(budget)
        found: Mapping[str, str] = target.index.fingerprints or fingerprints_by_reading(
            target.index, expected, target.read, most_bytes=budget.box_bytes
        )
        findings = [
            Finding("was not converted bit by bit", key, expected=text, found=found.get(key))
            for key, text in expected.items()
            if found.get(key) != text
        ]
        if findings:
            message = "what was written has other fingerprints than the source"
            raise CorruptCheckpointError(message, findings)
        return len(expected)


class FileTarget(Target):
    """Files of another program, created with room for all values, which are copied in C order."""

    @abstractmethod
    def create(self, path: Path) -> Mapping[Path, Mapping[str, int]]:
        """Create the files; at which byte of which the values of each tensor begin."""

    @abstractmethod
    def reopen(self, path: Path) -> TensorFiles | None:
        """What was written; None if it cannot be read here."""

    def is_alike(self, path: Path) -> bool:
        """Whether what is at a path is of the kind that is written."""
        return path.is_file()

    def write(self, budget: Budget) -> int:
        meter = Meter("convert", 0, self.progress)

        def move(batch: Sequence[_Copy]) -> None:
            """Copy what is read at once: one large box, or many small ones."""
            values = self.read([(tensor, box) for tensor, box, *_ in batch])
            for (tensor, box, descriptor, start), data in zip(batch, values, strict=True):
                position = start + ravel_offset(box.offset, tensor.shape) * tensor.dtype.itemsize
                view = bytes_of(np.ascontiguousarray(tensor_memory.as_numpy(data)))
                while view:
                    count = os.pwrite(descriptor, view, position)
                    view, position = view[count:], position + count
                meter.add(data.nbytes)

        with self._written_beside() as path, meter.phase("writing"):
            meter.expect(self.plan.num_bytes)
            with ExitStack() as stack:
                copies = self._copies(path, stack, budget.box_bytes)
                batches = list(in_batches(copies, budget.box_bytes, _MOST_COPIED_TOGETHER))
                in_threads(move, batches, budget.threads)
            self.source.opened.require_unchanged()
            if self.source.index.fingerprints and (files := self.reopen(path)) is not None:
                return self.prove(OpenedFiles(files, trusted=True), budget)
            return 0

    def _copies(self, path: Path, stack: ExitStack, most_bytes: int) -> Iterator[tuple[_Copy, int]]:
        """Create the files, open until the stack ends, and say what to copy, with its bytes."""
        tensors = {tensor.key: tensor for tensor in self.plan.tensors}
        for created, starts in self.create(path).items():
            descriptor = stack.enter_context(created.open("r+b")).fileno()
            for key, start in starts.items():
                tensor = tensors[key]
                for box in runs(tensor, most_bytes):
                    yield (tensor, box, descriptor, start), tensor.num_bytes_of(box)

    def _require_free(self) -> None:
        """Refuse a destination that is taken, unless it may be replaced."""
        destination: Path = self.destination
        is_empty = destination.is_dir() and not any(destination.iterdir())
        if is_empty or not os.path.lexists(destination):
            return
        if not self.options.overwrite:
            raise _exists(destination, "something is here", "Name another place, or pass --force.")
        if not self.is_alike(destination):
            problem = "holds something else than what would be written"
            raise _exists(destination, problem, "Delete it by hand, or name another place.")

    @contextmanager
    def _written_beside(self) -> Iterator[Path]:
        """A path to write a file or folder at; it becomes the destination if the body succeeds.

        It lies in a hidden folder beside it. A conversion that was killed leaves that; the next one
        begins by deleting it.
        """
        destination: Path = self.destination
        self._require_free()
        destination.parent.mkdir(parents=True, exist_ok=True)
        hidden = destination.with_name(f".{destination.name}.dckpt-partial")
        hidden.mkdir(exist_ok=True)
        try:
            lock = FolderLock.acquire(hidden)
        except CheckpointExistsError as error:
            problem = "another conversion writes here"
            findings = [replace(f, problem=problem) for f in error.findings]
            raise CheckpointExistsError(f"{destination} already exists", findings) from None
        with lock:
            for entry in hidden.iterdir():
                if entry.name != LOCK_NAME:
                    local_folder.remove(entry, hidden)
            new = hidden / "new"
            try:
                yield new
                self._require_free()
                if new.is_dir():
                    location.fsync_tree(new)
                    if destination.is_dir():
                        destination.rename(hidden / "old")
                else:
                    local_folder.fsync_file(new)
                new.replace(destination)
                local_folder.fsync_folder(destination.parent)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)


class SafetensorsTarget(FileTarget):
    """A folder as Hugging Face lays it out, or one file if the destination is named so."""

    def prepare(self) -> None:
        self.as_folder = not self.destination.name.endswith(safetensors_folder.SUFFIX)
        safetensors_folder.require_storable(self.rows)
        common = self.common
        self.texts = safetensors_folder.texts_of(common)
        self.model_files = safetensors_folder.model_files_of(common) if self.as_folder else {}
        kept = [*self.texts, *([safetensors_folder.MODEL_FILES_KEY] if self.model_files else [])]
        self.leave_out("common state that is no text", common, kept)
        self.leave_out("objects", (planned.key for planned in self.plan.objects))

    def create(self, path: Path) -> Mapping[Path, Mapping[str, int]]:
        most_bytes = self.options.shard_bytes if self.as_folder else None
        created = safetensors_folder.create(path, self.rows, self.texts, most_bytes)
        for name, data in self.model_files.items():
            (path / name).write_bytes(data)
        return created

    def reopen(self, path: Path) -> TensorFiles | None:
        # The package that reads them is an extra.
        can_read = find_spec("safetensors") is not None
        return safetensors_folder.SafetensorsFiles(path) if can_read else None

    def is_alike(self, path: Path) -> bool:
        if not self.as_folder:
            return path.is_file()
        suffixes = (safetensors_folder.SUFFIX, safetensors_folder.INDEX_SUFFIX)
        return path.is_dir() and all(
            entry.name in self.model_files or entry.name.endswith(suffixes)
            for entry in path.iterdir()
        )


class TorchTarget(FileTarget):
    """A file of torch.save that is loaded without trust."""

    def prepare(self) -> None:
        cells = {o.key: dict(self.source.objects[o.source_key]) for o in self.plan.objects}
        common = self.common
        self.kept, self.cells = torch_file.loadable(common), torch_file.loadable(cells)
        self.leave_out("common state that torch.load would refuse", common, self.kept)
        self.leave_out("objects that torch.load would refuse", cells, self.cells)

    def create(self, path: Path) -> Mapping[Path, Mapping[str, int]]:
        return {path: torch_file.create(path, self.rows, self.kept, self.cells)}

    def reopen(self, path: Path) -> TensorFiles:
        # It holds nothing but what torch.load reads without trust.
        return torch_file.TorchFile(path, trusted=True, most_bytes=self.options.memory_bytes)


FILE_TARGETS: Final[Mapping[str, type[FileTarget]]] = {
    "safetensors": SafetensorsTarget,
    "torch": TorchTarget,
}
"""The formats that are no checkpoints, as ``convert(to=)`` takes them."""


@dataclass(eq=False, kw_only=True)
class CheckpointTarget(Target):
    """A checkpoint, written by a save whose data is lazy; so its backend must accept a planner."""

    backend: tuple[str, int]

    def prepare(self) -> None:
        self._require_place()
        # Imports what will be used, so that its memory counts before the rest is divided.
        found: SaveShardedStrategy = select_strategy(StrategyAction.SAVE_SHARDED, self.backend)
        if not isinstance(found, PlannedSaveStrategy):
            problem = "it has no planner, so all tensors would have to be in memory"
            message = f"cannot convert into {self.backend[0]} {self.backend[1]}"
            raise CheckpointingException(message, [Finding(problem, found=type(found))])
        # A copy: a strategy that was registered by hand belongs to somebody else.
        self.strategy = copy.copy(found)

    def _require_place(self) -> None:
        """Refuse a place that is taken; a conversion that did not end may lie there."""
        folder: Location = self.destination
        if not location.is_there(folder):
            return
        if not location.is_folder(folder):
            raise _exists(folder, "a file is here", "Name another place.")
        if check_is_distributed_checkpoint(folder):
            if not self.options.overwrite:
                remedy = "Name another place, or pass --force."
                raise _exists(folder, "a checkpoint is here", remedy)
            return
        ours = {Path(name).parts[0] for name in leftovers(folder)} | {DCKPT_FOLDER, LOCK_NAME}
        if location.is_there(folder / CLAIMS):
            ours.add(DATA)
        if others := {*location.names_in(folder)} - ours:
            problem = f"the folder holds {min(others)!r}"
            raise _exists(folder, problem, "Name an empty or a new folder.")

    def write(self, budget: Budget) -> int:
        strategy, opened, destination = self.strategy, self.source.opened, self.destination
        strategy.planner = LazyPlanner(self, budget)
        strategy.options = StorageOptions(threads=budget.threads, buffer_bytes=budget.buffer_bytes)
        writer = strategy.make_writer(destination)
        has_fingerprints = bool(self.source.index.fingerprints)
        # Cut here as the backend would anyway, but along what is stored.
        most_bytes = budget.box_bytes
        if isinstance(writer.layout, RowBlockLayout):
            most_bytes = min(most_bytes, writer.layout.max_chunk_bytes)
        # A dict that holds nothing but sharded leaves leaves no trace in the common state.
        leaves, common = dict(enumerate(self._leaves(most_bytes))), dict(self.common)
        if leaves:
            free_key = next(name for name in map(str, range(len(common) + 1)) if name not in common)
            common[free_key] = leaves
        before, is_saved = attempt_of(destination), False
        try:
            save_with_hooks(
                SaveHooks(before_claim=lambda _: opened.require_unchanged()),
                common,
                destination,
                comm=SingleProcess(),
                sharded_strategy=strategy,
                overwrite=self.options.overwrite,
                progress=self.progress,
                trusted=self.options.trusted,
                fingerprints=has_fingerprints and writer.keeps_fingerprints,
            )
            is_saved = True
            return self.prove(Checkpoint.open(destination), budget) if has_fingerprints else 0
        except BaseException:
            # Nothing is left of what this has begun; what was there before it began stays.
            began = attempt_of(destination) != before
            if is_saved or (began and not check_is_distributed_checkpoint(destination)):
                remove_checkpoint(destination)
            raise

    def _leaves(self, most_bytes: int) -> Iterator[ShardedTensor | ShardedObject]:
        """Tensors without memory in boxes of at most ``most_bytes``, and objects."""
        for tensor in self.plan.tensors:
            dtype, shape = tensor.dtype.torch, tensor.shape
            for box in shards(tensor, most_bytes):
                data = torch.empty(box.shape, dtype=dtype, device="meta")
                yield ShardedTensor(tensor.key, data, dtype, box.shape, shape, box.offset, None)
        for planned in self.plan.objects:
            handle = self.source.objects[planned.source_key]
            for cell in handle:
                yield ShardedObject(planned.key, handle[cell], planned.shape, cell)


@dataclass(eq=False)
class _Group:
    """Items that are read together, in the order of the plan; as one box, if they make one up."""

    items: list[WriteItem]
    box: Box | None = None
    is_read: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class LazyPlanner(DefaultSavePlanner):
    """Reads from the source when the writer asks for an item; neighbours are read together."""

    def __init__(self, target: Target, budget: Budget) -> None:
        super().__init__()
        self._target = target
        self._tensors = {tensor.key: tensor for tensor in target.plan.tensors}
        self._most_together = budget.box_bytes
        self._groups: dict[MetadataIndex, _Group] = {}
        # What was read and not yet asked for, and how many bytes more of it there may be.
        self._waiting: dict[MetadataIndex, torch.Tensor] = {}
        self._room = budget.threads * budget.box_bytes
        self._lock = threading.Lock()

    @property
    def makes_data(self) -> bool:
        return True

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        final = super().finalize_plan(plan)
        groups = self._grouped(final.items)
        self._groups = {item.index: group for group in groups for item in group.items}
        return final

    def get_data(self, item: WriteItem) -> torch.Tensor | object:
        if item.tensor_data is None:
            return super().get_data(item)
        if (group := self._groups.get(item.index)) is not None:
            with group.lock:
                if not group.is_read and self._room > 0:
                    values, group.is_read = self._read(group), True
                    self._add_room(-sum(data.nbytes for data in values))
                    indices = (item.index for item in group.items)
                    self._waiting.update(zip(indices, values, strict=True))
        data = self._waiting.pop(item.index, None)
        if data is None:  # there is no room for its group, or it was read before its group
            return self._read(_Group([item]))[0]
        self._add_room(data.nbytes)
        return data

    def _add_room(self, num_bytes: int) -> None:
        with self._lock:
            self._room += num_bytes

    def _read(self, group: _Group) -> list[torch.Tensor]:
        items, whole = group.items, group.box
        tensors = [self._tensors[item.index.fqn] for item in items]
        if whole is None:
            return [*self._target.read([*zip(tensors, map(_box, items), strict=True)])]
        (read,) = self._target.read([(tensors[0], whole)])
        return [read[_box(item).relative_to(whole.offset).slices()] for item in items]

    def _grouped(self, items: Sequence[WriteItem]) -> Iterator[_Group]:
        """Items to read together: rows of parts that are cut across, and small neighbours."""
        small: list[tuple[WriteItem, int]] = []
        plain = [item for item in items if item.tensor_data is not None]
        for (key, start, height), found in itertools.groupby(plain, _rows):
            parts, tensor = list(found), self._tensors[key]
            if len(parts) > 1 and is_cut_across(tensor):
                box = Box((start, *[0] * (len(tensor.shape) - 1)), (height, *tensor.shape[1:]))
                is_whole = sum(_box(item).num_elements for item in parts) == box.num_elements
                if is_whole and _LARGE_BYTES <= tensor.num_bytes_of(box) <= 2 * self._most_together:
                    yield _Group(parts, box)
                    continue
            sized = ((item, item.tensor_storage_size() or 0) for item in parts)
            small += [(item, size) for item, size in sized if size < _LARGE_BYTES]
        yield from map(_Group, in_batches(small, _TOGETHER_BYTES, _MOST_TOGETHER))


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _rows(item: WriteItem) -> tuple[str, int, int]:
    """Key, first row and number of rows."""
    box = _box(item)
    return item.index.fqn, *((box.offset[0], box.shape[0]) if box.shape else (0, 1))


def _exists(path: Location, problem: str, remedy: str) -> CheckpointingException:
    finding = Finding(problem, path=str(path), remedy=remedy)
    return CheckpointExistsError(f"{path} already exists", [finding])
