"""convert: from a checkpoint or files of tensors into another, within a budget of memory.

It is written whole or not at all and never over what is there: by an ordinary save, whose planner
reads from the source.
"""

from __future__ import annotations

import copy
import errno
import itertools
import logging
import re
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_checkpointing.byte_sizes import bytes_text, in_batches
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
)
from dist_checkpointing.filesystem import local_folder, location
from dist_checkpointing.filesystem.local_folder import DCKPT_FOLDER
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.locks import LOCK_NAME
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.filesystem.object_store_locks import CLAIMS
from dist_checkpointing.format.commit import DATA, check_is_distributed_checkpoint
from dist_checkpointing.format.geometry import Box
from dist_checkpointing.format.index import size_of_files
from dist_checkpointing.format.leftovers import attempt_of, leftovers
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.format.seal import shared_name
from dist_checkpointing.mapping import ShardedObject, ShardedTensor
from dist_checkpointing.mapping.state_dict_parts import with_leaves
from dist_checkpointing.planning import DefaultSavePlanner, MetadataIndex, SavePlan, WriteItem
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.recipe import Derivation, Recipe, require_recipe
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_folder import SaveHooks, partial_folder
from dist_checkpointing.storage.fingerprints import fingerprints_by_reading
from dist_checkpointing.storage.interface import StorageWriter
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.progress import ProgressOption
from dist_checkpointing.strategies.base import PlannedSaveStrategy, SaveShardedStrategy
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.selection import select_strategy
from dist_checkpointing.strategies.verification import cause_of
from dist_checkpointing.tools.convert.plan import (
    ConversionPlan,
    ConvertOptions,
    is_cut_across,
    plan_conversion,
    shards,
)
from dist_checkpointing.tools.convert.source import Source
from dist_checkpointing.tools.values import Budget, budget_of

logger: logging.Logger = logging.getLogger(__name__)

_LARGE_BYTES = 2**20
_TOGETHER_BYTES = 8 * 2**20
_MOST_TOGETHER = 1024
_LEAST_GROWN_BYTES = 2**28
_MOST_GROWTH = 64
"""Files of tensors become at most so many bytes, and so many times larger, unless that is asked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """What was done, or would be; texts are in words.

    Attributes:
        left_out: what the target cannot hold.
        verified_bytes: bytes of the source that were compared with its checksums.
        not_verified: what was not verified, and why; None if all tensors were, or would be.
        num_proven: number of tensors whose fingerprint in the destination is that of the source.
        made: what the recipe makes of the source; ``str()`` of it says what comes from where.
    """

    source: str
    target: str
    plan: ConversionPlan
    left_out: tuple[str, ...]
    verified_bytes: int
    not_verified: str | None
    num_proven: int
    made: Derivation
    seconds: float


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    to: str | tuple[str, int] | SaveShardedStrategy = "tensorstore",
    *,
    recipe: Recipe | None = None,
    options: ConvertOptions | None = None,
    progress: ProgressOption | None = None,
    comm: Comm | None = None,
) -> Conversion:
    """Convert tensors from one format into another, bit by bit unless the recipe casts them.

    Streams: what is in memory at a time stays within the budget, whatever the size. Nothing is at
    the destination until all of it is; a conversion that was killed is begun again by the next one.
    Tensors are compared with the checksums of the source, so that damage does not get new ones.
    The configuration and tokenizer files of a Hugging Face folder become common state, and come
    back into the next such folder.
    If the source has fingerprints and the destination can keep them, they are computed again from
    what is written, and must be the same wherever the dtype is.

    Args:
        source: a committed checkpoint of any backend (also of Megatron and torch DCP), safetensors
            files (one, or a Hugging Face folder), a file of torch.save, or a folder of a DeepSpeed
            ZeRO checkpoint.
        destination: a folder, or a URL for a checkpoint; a file for ``torch_file``, and for
            ``safetensors`` if its name says so.
        to: what saves it: ``"backend"``, ``"backend:version"``, ``(backend, version)`` or a
            strategy with options of its own.
        recipe: what to make of the tensors; by default they stay as they are. Rules that match
            nothing are logged.
        options: how tensors are cut, whether casts may change values, memory and the like.
        progress: called with a Progress, from any thread.
        comm: the ranks that share the work, each with ``options`` of its own; all of them call
            this. By default, this process alone.

    Raises:
        CheckpointNotFoundError: ``source`` holds nothing that is read.
        CheckpointExistsError: ``destination`` is taken. Nothing was touched.
        CorruptCheckpointError: the source is damaged. Nothing new is at the destination.
        StrategyNotFoundError: nothing provides ``to``.
        StateMismatchError: the recipe does not fit the source; it names the rule.
        TypeError: ``recipe`` is no Recipe.
        CheckpointingException: anything else. Nothing new is at the destination.

    Example:
        >>> import torch
        >>> from dist_checkpointing import Checkpoint, ShardedTensor, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> from dist_checkpointing.planning import Recipe, Rename
        >>> from dist_checkpointing.tools.convert import convert
        >>> save(state, "ckpt")
        >>> convert("ckpt", "other", "zarr", recipe=Recipe(Rename("w", to="weight"))).target
        'zarr 2'
        >>> list(Checkpoint.open("other"))
        ['weight']
    """
    began, options = time.perf_counter(), options or ConvertOptions()
    if isinstance(to, str) and (form := re.fullmatch(r"(.+):(\d+)", to)):
        to = form[1], int(form[2])
    comm, recipe = comm or SingleProcess(), Recipe() if recipe is None else recipe
    require_recipe(recipe)
    # All that can be wrong is found out before a byte is written.
    with comm.agreed("planning the conversion"):
        place = as_location(destination)
        opened = Checkpoint.open(source, trusted=options.trusted)
        stored = Source(opened, recipe)
        objects = {key: handle.shape for key, handle in stored.objects.items()}
        plan = plan_conversion(stored.made, objects, options)
        if location.overlap(opened.path, place):
            problem, remedy = "source and destination overlap", "Convert into another place."
            finding = Finding(problem, path=str(place), remedy=remedy)
            raise CheckpointExistsError("cannot convert a checkpoint into itself", [finding])
        # Before memory is divided, so that the checksums count.
        not_verified: str | None = "verification was turned off"
        if options.verify:
            is_verified = stored.find_checksums() or not plan.tensors
            not_verified = None if is_verified else "the source keeps no checksums"
        target = Target(stored, plan, place, to, options)
        if not (options.overwrite or options.dry_run):
            _require_expected_size(opened.folder, plan.num_bytes)
        location.check_room(place.absolute().parent, plan.num_bytes)
        budget = budget_of(options.memory_bytes, options.threads)
        stored.limit(budget)
    for finding in () if comm.rank else stored.made.unused:
        logger.warning("%s", finding)
    num_proven = 0
    if not options.dry_run:
        with _writing(place, comm):
            num_proven = target.write(budget, progress, comm)
    return Conversion(
        source=" ".join(map(str, opened.backend)),
        target=target.backend,
        plan=plan,
        left_out=tuple(target.left_out),
        num_proven=num_proven,
        verified_bytes=sum(comm.all_gather(stored.checks.num_bytes)),
        not_verified=not_verified,
        made=stored.made,
        seconds=time.perf_counter() - began,
    )


def _require_expected_size(path: Location, num_bytes: int) -> None:
    """Refuse to write in full what repeats a few stored values, as after ``expand``."""
    stored = location.size_of(path) or size_of_files(path)[0]
    if num_bytes > _LEAST_GROWN_BYTES + _MOST_GROWTH * stored:
        problem = f"tensors of {bytes_text(num_bytes)} are views of {bytes_text(stored)}"
        remedy = "--dry-run names them, --force (overwrite=True) writes them in full."
        finding = Finding(problem, remedy=remedy)
        raise CheckpointingException("far more would be written than is stored", [finding])


@contextmanager
def _writing(destination: Location, comm: Comm) -> Iterator[None]:
    """Say in few words what cannot be written."""
    try:
        yield
    except (RankFailedError, OSError) as error:
        # The name of the only rank and its traceback say nothing to the caller.
        cause = cause_of(error) if comm.world_size == 1 else error
        if isinstance(cause, CheckpointingException):
            raise cause from None
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        finding = Finding(str(cause), remedy="Free some space." if is_full else None)
        message = f"cannot write {destination}: nothing of it is left"
        raise CheckpointingException(message, [finding]) from error


@dataclass(eq=False)
class Target:
    """One conversion: a save whose data is lazy; so its backend must accept a planner.

    ``left_out`` says what the format cannot hold.
    """

    source: Source
    plan: ConversionPlan
    destination: Any
    strategy: Any
    options: ConvertOptions
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Imports what will be used, so that its memory counts before the rest is divided.
        found: SaveShardedStrategy = select_strategy(StrategyAction.SAVE_SHARDED, self.strategy)
        self.backend: str = f"{found.backend} {found.version}"
        if not isinstance(found, PlannedSaveStrategy):
            problem = "it has no planner, so all tensors would have to be in memory"
            message = f"cannot convert into {self.backend}"
            raise CheckpointingException(message, [Finding(problem, found=type(found))])
        # A copy: a strategy that was registered or passed belongs to somebody else.
        self.strategy = copy.copy(found)
        keeps_cuts = getattr(found, "writer_type", StorageWriter).keeps_cuts
        if self.options.reshard and not keeps_cuts:
            finding = Finding("each tensor is stored in one run", found=self.backend)
            raise CheckpointingException("reshard makes no sense here", [finding])
        self.is_one_file: bool = found.is_one_file(self.destination)
        self._require_place()
        common = {} if self.options.tensors_only else self.source.common()
        cells = {key: dict(self.source.objects[key]) for key in self.plan.objects}
        self.common, self.cells = self.strategy.holdable(self.destination, common, cells)
        self._leave_out("common state", common, self.common)
        self._leave_out("objects", cells, self.cells)

    def _leave_out(self, what: str, names: Iterable[object], kept: Container[object]) -> None:
        """Note the names that are not kept: the first of them."""
        if lost := [str(name) for name in names if name not in kept]:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            self.left_out.append(f"{what} ({', '.join(lost[:5])}{more})")

    def prove(self, written: Checkpoint, budget: Budget) -> int:
        """Compare what was written with the fingerprints of the source; how many were compared.

        Those of tensors with another dtype differ. A format that keeps none is read again.
        """
        expected = self.source.index.fingerprints
        found: Mapping[str, str] = written.index.fingerprints or fingerprints_by_reading(
            written.index, expected, Source(written, Recipe()).read, most_bytes=budget.box_bytes
        )
        findings = [
            Finding("was not converted bit by bit", key, expected=text, found=found.get(key))
            for key, text in expected.items()
            if found.get(key) != text
        ]
        problem = "what was written has other fingerprints than the source"
        CorruptCheckpointError.raise_if(findings, problem)
        return len(expected)

    def _require_place(self) -> None:
        """Refuse a place that is taken; a conversion that did not end may lie there."""
        folder: Location = self.destination
        if not location.is_there(folder):
            return
        what = "file" if self.is_one_file else "checkpoint"
        if location.is_folder(folder) is self.is_one_file:
            what = "folder" if self.is_one_file else "file"
            problem, remedy = f"a {what} is here", "Name another place."
        elif self.is_one_file or check_is_distributed_checkpoint(folder):
            if self.options.overwrite:
                return
            problem, remedy = f"a {what} is here", "Name another place, or pass --force."
        else:
            made, attempt = leftovers(folder), attempt_of(folder) or ""
            made |= {shared_name(name, attempt) for name in made}
            ours = {Path(name).parts[0] for name in made} | {DCKPT_FOLDER, LOCK_NAME}
            if location.is_there(folder / CLAIMS):
                ours.add(DATA)
            others = {*location.names_in(folder)} - ours
            if not others:
                return
            problem, remedy = f"the folder holds {min(others)!r}", "Name an empty or a new folder."
        finding = Finding(problem, path=str(folder), remedy=remedy)
        raise CheckpointExistsError(f"{folder} already exists", [finding])

    def write(self, budget: Budget, progress: ProgressOption | None, comm: Comm) -> int:
        """Save it; the number of tensors proven to be those of the source. Collective."""
        strategy, opened, destination = self.strategy, self.source.opened, self.destination
        strategy.planner = LazyPlanner(self, budget)
        strategy.options = StorageOptions(
            threads=budget.threads,
            buffer_bytes=budget.buffer_bytes,
            data_file_bytes=self.options.shard_bytes,
        )
        writer = strategy.make_writer(destination)
        has_fingerprints = bool(self.source.made.stored.fingerprints)
        # Cut here as the backend would anyway, but along what is stored.
        most_bytes = budget.box_bytes
        if isinstance(writer.layout, RowBlockLayout):
            most_bytes = min(most_bytes, writer.layout.max_chunk_bytes)
        state_dict = with_leaves(self.common, [*self._leaves(most_bytes, comm)])
        begun = partial_folder(destination) if self.is_one_file else destination
        before, is_saved, num_proven = attempt_of(begun), False, 0
        try:
            save_with_hooks(
                SaveHooks(before_claim=lambda _: opened.require_unchanged()),
                state_dict,
                destination,
                comm=comm,
                sharded_strategy=strategy,
                overwrite=self.options.overwrite,
                progress=progress,
                trusted=self.options.trusted,
                fingerprints=has_fingerprints and writer.keeps_fingerprints,
            )
            is_saved = True
            with comm.agreed("comparing fingerprints"):
                if has_fingerprints and comm.rank == 0:
                    num_proven = self.prove(Checkpoint.open(destination), budget)
        except BaseException:
            # Nothing is left of what this has begun; what was there before it began stays.
            began = attempt_of(begun) != before
            if comm.rank:
                pass
            elif is_saved and attempt_of(destination) is None:
                local_folder.remove(destination, destination.parent)
            elif is_saved or (began and not check_is_distributed_checkpoint(begun)):
                remove_checkpoint(begun)
            raise
        return num_proven

    def _leaves(self, most_bytes: int, comm: Comm) -> Iterator[ShardedTensor | ShardedObject]:
        """This rank's share of tensors without memory in boxes of at most ``most_bytes``, which lie
        side by side, and on rank 0 all objects.
        """
        tensors = self.plan.tensors
        boxes = [(tensor, box) for tensor in tensors for box in shards(tensor, most_bytes)]
        ends = np.cumsum([tensor.num_bytes_of(box) for tensor, box in boxes])
        limits = np.linspace(0, ends[-1] if boxes else 0, comm.world_size + 1)[comm.rank :][:2]
        first, last = np.searchsorted(ends, limits, side="right")
        if comm.rank == comm.world_size - 1:
            last = len(boxes)
        for tensor, box in boxes[first if comm.rank else 0 : last]:
            leaf = ShardedTensor.of_box(tensor.stored, box)
            leaf.data = torch.empty(box.shape, dtype=leaf.dtype, device="meta")
            yield leaf
        for key, shape in () if comm.rank else self.plan.objects.items():
            for cell, value in self.cells.get(key, {}).items():
                yield ShardedObject(key, value, shape, cell)


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
        self._source = target.source
        self._tensors = {tensor.stored.key: tensor for tensor in target.plan.tensors}
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
        if whole is None:
            return self._source.read([(item.index.fqn, _box(item)) for item in items])
        (read,) = self._source.read([(items[0].index.fqn, whole)])
        return [read[_box(item).relative_to(whole.offset).slices()] for item in items]

    def _grouped(self, items: Sequence[WriteItem]) -> Iterator[_Group]:
        """Items to read together: rows of parts that are cut across, and small neighbours."""
        small: list[tuple[WriteItem, int]] = []
        plain = [item for item in items if item.tensor_data is not None]
        for (key, start, height), found in itertools.groupby(plain, _rows):
            parts, tensor = list(found), self._tensors[key]
            if len(parts) > 1 and is_cut_across(tensor):
                box = Box(
                    (start, *[0] * (len(tensor.stored.global_shape) - 1)),
                    (height, *tensor.stored.global_shape[1:]),
                )
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
