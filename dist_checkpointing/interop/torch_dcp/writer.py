"""DCPWriter: ``dcp.save`` into our backends.

DCP decides which rank writes which box. Our tables travel between the ranks in its plans and
results, so there is no communication beyond that of ``dcp.save`` itself.
"""

from __future__ import annotations

import copy
import io
import math
import os
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import (
    metadata as dcp_metadata,
    planner as dcp,
    storage as dcp_storage,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.futures import Future

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.comm.rank_failures import Outcome
from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    InvalidShardingError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem.location import as_local_folder, is_url
from dist_checkpointing.format.commit import CheckpointingConfig, check_distinct
from dist_checkpointing.format.index import Index
from dist_checkpointing.interop.torch_dcp.reader import DCP_KEYS_NAME, DCPKeys
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, WriteItem
from dist_checkpointing.planning.chunking import Layout
from dist_checkpointing.planning.save_plan import checked_plans
from dist_checkpointing.planning.shard_table import table_of_rows
from dist_checkpointing.serialization.save_folder import SaveFolder, SaveHooks
from dist_checkpointing.storage.driver import Written, finish_all, write_plan
from dist_checkpointing.storage.interface import StorageWriter, set_up_writer
from dist_checkpointing.storage.options import Durability
from dist_checkpointing.strategies.base import (
    PlannedSaveStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from dist_checkpointing.strategies.registry import StrategyAction
from dist_checkpointing.strategies.safe_pickle import check_plain
from dist_checkpointing.strategies.selection import Selection, select_strategy
from dist_checkpointing.strategies.torch_dist.metadata import DCP_VERSION
from dist_checkpointing.validation.save_errors import walk


class RankPlan(NamedTuple):
    """What the coordinator sends to a rank, inside of DCP's plan.

    ``sources`` of ``plan``, which is cut as it is stored, are positions of items in DCP's plan;
    ``writes`` is (backend, version) of its strategy; plans of one save have one number ``save``.
    """

    plan: SavePlan
    rank: int
    world_size: int
    writes: tuple[str, int]
    save: int


def is_usable(plan: dcp.SavePlan) -> bool:
    return bool(getattr(plan, "usable", True))


def full_plans(plans: Sequence[dcp.SavePlan]) -> list[list[dcp.SavePlan]]:
    """The plans of all ranks with all items; several lists if DCP's plan cache allows several,
    CheckpointingException if it has none.

    With plan caching, the coordinator gets no items from ranks whose plan has not changed. But the
    layout of a tensor depends on its parts on all ranks, so the plans are looked up in the cache of
    the planner.
    """
    if all(map(is_usable, plans)):
        return [list(plans)]
    cache: Mapping[str, list[dcp.SavePlan]] = getattr(dcp.SavePlanner, "_cached_global_plan", {})
    found = [
        list(cached)
        for cached in cache.values()
        if len(cached) == len(plans)
        and all(new is old or not is_usable(new) for new, old in zip(plans, cached, strict=True))
    ]
    if not found or (len(found) > 1 and any(map(is_usable, plans))):
        finding = Finding(
            "the planner left out the plans of some ranks",
            ranks=tuple(rank for rank, plan in enumerate(plans) if not is_usable(plan)),
            remedy="Switch enable_plan_caching off.",
        )
        raise CheckpointingException("cached plans cannot be found", [finding])
    return found


def lay_out(plans: Sequence[dcp.SavePlan], layout: Layout) -> tuple[list[SavePlan], Index]:
    """What each rank stores for DCP's plans, and the index of the checkpoint; InvalidShardingError
    if an element is written more than once or never, or cannot be stored.
    """
    planner = DefaultSavePlanner()
    planner.configure_planner({}, is_coordinator=True, rank=0, layout=layout)
    announced = []
    for rank, plan in enumerate(plans):
        rows = []
        for position, item in enumerate(plan.items):
            if (data := item.tensor_data) is not None:
                name = item.index.fqn
                dtype = tensor_memory.from_torch(data.properties.dtype, key=name).name
                box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                # All are main replicas: DCP has chosen among them.
                rows.append((name, dtype, tuple(data.size), *box, None, True, position))
        announced.append(SavePlan(table_of_rows(rank, rows)))
    own_plans, index, _ = checked_plans(announced, planner)
    return [planner.finalize_plan(plan) for plan in own_plans], index


def check_complete(
    described: Mapping[str, Any], saves: Collection[int], index: Index, values: Collection[str]
) -> None:
    """Refuse to commit something else than DCP's plans say, whose cache may be out of date:
    CheckpointingException with every name that is missing or has another shape.
    """
    findings = []
    remedy = "Switch enable_plan_caching off, or save again."
    if len(saves) > 1:
        findings.append(Finding("the ranks wrote plans of different saves", remedy=remedy))
    for name, stored in described.items():
        size = getattr(stored, "size", None)  # of a tensor
        if name not in (values if size is None else index):
            findings.append(Finding("was not written by any rank", name, remedy=remedy))
        elif size is not None and index[name].global_shape != tuple(size):
            expected, found = tuple(size), index[name].global_shape
            problem = "another shape was written"
            findings.append(Finding(problem, name, expected, found, remedy=remedy))
    CheckpointingException.raise_if(findings, "DCP's cached plans are not those of this state dict")


class DCPWriter(dcp_storage.StorageWriter):
    """A storage for ``torch.distributed.checkpoint.save`` and ``async_save``.

    It writes an ordinary checkpoint of this library: ``load`` and DCPReader read it. The keys of
    tensors are DCP's fully qualified names; values that are not tensors are common state.

    It works with any planner whose plans list all that is written, with DCP's plan caching, in one
    process and in several. ``use_collectives=False`` is refused: a checkpoint needs one commit.

    Args:
        path: folder of the checkpoint, made if it is missing. ``checkpoint_id`` of ``dcp.save``
            replaces it.
        backend: backend name (its newest version), (name, version), or a strategy.
        common_backend: likewise, for values that are not tensors; by default ("torch", 1).
        overwrite: give up a committed checkpoint at ``path`` as soon as the new one is planned.
        trusted: save anything that can be pickled. Only a DCPReader with ``trusted=True`` reads
            back what is not plain data. Without it, such a save fails before it is committed.
        thread_count: threads that write; by default those of the strategy.
        sync_files: whether the checkpoint survives a power cut, if the strategy's do.
        cache_staged_state_dict: keep pinned memory for the copies of ``async_save``, with a GPU.
        single_file_per_rank: without effect.
        per_thread_copy_ahead: without effect.

    Raises:
        StrategyNotFoundError: if there is no such backend.
        UnsupportedFormatError: if the strategy is not a PlannedSaveStrategy, or has a planner of
            its own (DCP has one); or if ``_extensions`` are given.

    Example:
        >>> from torch.distributed import checkpoint as dcp
        >>> state = {"w": torch.ones(2, 3), "step": 17}
        >>> _ = dcp.save(state, storage_writer=DCPWriter("ckpt/17"))
        >>> load_common_state_dict("ckpt/17")
        {'step': 17}
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        backend: Selection[SaveShardedStrategy] = "tensorstore",
        *,
        common_backend: Selection[SaveCommonStrategy] = None,
        overwrite: bool = False,
        trusted: bool = False,
        thread_count: int | None = None,
        sync_files: bool = True,
        cache_staged_state_dict: bool = False,
        single_file_per_rank: bool = True,
        per_thread_copy_ahead: int = 10_000_000,
        _extensions: Sequence[Any] | None = None,
    ) -> None:
        super().__init__()
        del single_file_per_rank, per_thread_copy_ahead
        if _extensions:
            remedy = 'To compress, pass backend=Zarr3SaveShardedStrategy(codec="zstd").'
            finding = Finding("extensions of DCP are not called", remedy=remedy)
            raise UnsupportedFormatError("DCPWriter takes no _extensions", [finding])
        strategy = copy.copy(select_strategy(StrategyAction.SAVE_SHARDED, backend))
        if not isinstance(strategy, PlannedSaveStrategy) or strategy.planner is not None:
            problem = "DCP needs a PlannedSaveStrategy without a planner"
            finding = Finding(problem, found=str(strategy))
            raise UnsupportedFormatError("this strategy cannot be a DCP storage", [finding])
        if thread_count is not None:
            strategy.options = replace(strategy.options, threads=thread_count)
        if not sync_files:
            strategy.options = replace(strategy.options, durability=Durability.PAGE_CACHE)
        if cache_staged_state_dict and torch.cuda.is_available():
            # What has its attributes is an AsyncStager, and DCP asks it to stage.
            stager = BlockingAsyncStager(cache_staged_state_dict=True)
            names = [name for name in dir(stager) if not name.startswith(("__", "_abc"))]
            vars(self).update({name: getattr(stager, name) for name in names})
        self.path: Path = as_local_folder(path)
        self.overwrite = overwrite
        self.trusted = trusted
        self._strategy = strategy
        self._common: SaveCommonStrategy = select_strategy(
            StrategyAction.SAVE_COMMON, common_backend
        )
        self._save_id = uuid.uuid4().hex
        self._folder: SaveFolder | None = None
        self._writer: StorageWriter | None = None
        self._index: Index | None = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether ``checkpoint_id`` can be a folder."""
        return isinstance(checkpoint_id, str | os.PathLike) and not is_url(checkpoint_id)

    def storage_meta(self) -> dcp_metadata.StorageMeta | None:
        return dcp_metadata.StorageMeta(checkpoint_id=self.path, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Get ready for another save, and give up one that was not finished."""
        self._give_up()
        if checkpoint_id is not None:
            self.path = as_local_folder(checkpoint_id)
        self._save_id = uuid.uuid4().hex

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args
        self._give_up()
        if not kwargs.get("use_collectives", True):
            finding = Finding("use_collectives=False", remedy="Leave it out.")
            raise UnsupportedFormatError("a checkpoint needs one commit by all ranks", [finding])

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Decide on the layout, check that nothing is missing, and claim the folder."""
        every = full_plans(plans)
        writer = self._strategy.make_writer(self.path)
        laid_out = [lay_out(full, writer.layout) for full in every]
        others = [*self._common.created_names([]), DCP_KEYS_NAME]
        names: dict[str, None] = {}
        for _, index in laid_out:
            created = [*writer.created_names(index, world_size=len(plans)), *others]
            check_distinct(created)
            names |= dict.fromkeys(created)
        self._folder = SaveFolder(self.path, SaveHooks(), overwrite=self.overwrite)
        config = CheckpointingConfig(*self._writes, self._common.backend, self._common.version)
        self._folder.config, self._folder.durability = config, writer.options.durability
        planned = Outcome("planning the save", laid_out[0][1])
        self._folder.claim(SingleProcess(), planned, lambda _: names, durable=True)
        set_up_writer(writer, rank=0, world_size=len(plans))
        self._writer = writer
        # Between its local and global plans, DCP calls nothing of this library: the writer of the
        # coordinator prepares the local plans of all ranks.
        local_plans = [writer.prepare_local_plan(plan) for plan in laid_out[0][0]]
        final, save = writer.prepare_global_plan(local_plans), uuid.uuid4().int
        if not any(map(is_usable, plans)):
            return plans  # nothing has changed: every rank has its plan from an earlier save
        return [
            replace(plan, storage_data=RankPlan(own, rank, len(plans), self._writes, save))
            for rank, (plan, own) in enumerate(zip(every[0], final, strict=True))
        ]

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> Future[list[dcp_storage.WriteResult]]:
        rank_plan = plan.storage_data
        if not isinstance(rank_plan, RankPlan) or rank_plan.writes != self._writes:
            finding = Finding(
                "the plan was cached by a save into another storage",
                expected=self._writes,
                found=getattr(rank_plan, "writes", type(rank_plan).__name__),
                remedy="With enable_plan_caching, use another planner class for each storage.",
            )
            raise CheckpointingException("the plan is not for this storage", [finding])
        self._index = rank_plan.plan.index
        if self._writer is None:
            self._writer = self._strategy.make_writer(self.path)
            set_up_writer(self._writer, rank=rank_plan.rank, world_size=rank_plan.world_size)
        self._writer.attempt = f"{rank_plan.save:032x}"
        data = _ResolvedData(plan.items, rank_plan.plan.items, planner)
        written = write_plan(rank_plan.plan, data, self._writer, rank_plan.rank).packed()
        for_finish = written.writer_results if self._writer.gathers_results else ()
        written = replace(written, writer_results=for_finish, save=rank_plan.save)
        results = []
        for item in plan.items:
            content: bytes | None = None
            if item.type is dcp.WriteItemType.BYTE_IO:
                stream: Any = planner.resolve_data(item)
                stream.seek(0)
                content = stream.read()
                num_bytes = len(content)
            else:
                part: Any = item.tensor_data
                num_bytes = math.prod(part.chunk.sizes) * part.properties.dtype.itemsize
            results.append(dcp_storage.WriteResult(item.index, num_bytes, content))
        # The last one is what this rank has written of tensors.
        results.append(dcp_storage.WriteResult(dcp_metadata.MetadataIndex(""), 0, written))
        done: Future[list[dcp_storage.WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(
        self, metadata: dcp_metadata.Metadata, results: list[list[dcp_storage.WriteResult]]
    ) -> None:
        assert self._writer is not None
        assert self._index is not None
        assert self._folder is not None
        of_ranks: list[Written] = [of_rank[-1].storage_data for of_rank in results]
        contents = {
            result.index.fqn: result.storage_data
            for of_rank in results
            for result in of_rank[:-1]
            if result.storage_data is not None
        }
        names, saves = metadata.state_dict_metadata, {written.save for written in of_ranks}
        check_complete(names, saves, self._index, contents.keys())
        values, raw = _loaded(contents)
        keys = DCPKeys.of(names, sorted(contents), raw, metadata.planner_data)
        nested = keys.nest(values)
        try:
            check_plain(walk(nested), {}, trusted=self.trusted)
        except CheckpointingException:
            self._give_up()
            raise
        finished = finish_all(self._index, of_ranks, self._writer)
        durability = self._writer.options.durability
        self._common.lasting(durability).save_common(nested, self.path)
        keys.write(self.path, durability)
        self._folder.commit(SingleProcess(), lambda: finished, self._writer)
        self._folder = None
        metadata.storage_meta = self.storage_meta()
        metadata.version = DCP_VERSION

    @property
    def _writes(self) -> tuple[str, int]:
        return self._strategy.backend, self._strategy.version

    def _give_up(self) -> None:
        if self._folder is not None:
            self._folder.give_up(CheckpointingException())
        self._folder = self._writer = self._index = None


class _ResolvedData(DefaultSavePlanner):
    def __init__(
        self, items: Sequence[dcp.WriteItem], parts: Sequence[WriteItem], planner: dcp.SavePlanner
    ) -> None:
        super().__init__()
        self._items = items
        self._planner = planner
        self._parts_left = Counter(part.index.index for part in parts)
        self._resolved: dict[int, Any] = {}
        self._lock = threading.Lock()
        for part in parts:
            position: Any = part.index.index
            if position >= len(items) or items[position].index.fqn != part.index.fqn:
                finding = Finding("the plan is another one after finish_plan", part.index.fqn)
                raise CheckpointingException("the planner changed a plan too late", [finding])

    def get_data(self, item: WriteItem) -> torch.Tensor:
        position: Any = item.index.index
        part: Any = item.tensor_data
        own: Any = self._items[position].tensor_data
        # A planner may compute the data, and a large tensor is written in several parts.
        with self._lock:
            if position not in self._resolved:
                self._resolved[position] = self._planner.resolve_data(self._items[position])
            tensor: torch.Tensor = self._resolved[position]
            self._parts_left[position] -= 1
            if not self._parts_left[position]:
                del self._resolved[position]
        if tuple(tensor.shape) != tuple(own.chunk.sizes) or tensor.dtype != own.properties.dtype:
            finding = Finding(
                "the planner's data is not what its plan says",
                item.index.fqn,
                expected=f"{own.properties.dtype} {tuple(own.chunk.sizes)}",
                found=f"{tensor.dtype} {tuple(tensor.shape)}",
            )
            raise InvalidShardingError("the data contradicts the plan", [finding])
        if part.chunk.shape == tuple(tensor.shape):
            return tensor
        return tensor[part.chunk.relative_to(tuple(own.chunk.offsets)).slices()]


def _loaded(contents: Mapping[str, bytes]) -> tuple[dict[str, Any], list[str]]:
    """The values, and the names of those that are bytes in another format."""
    values: dict[str, Any] = {}
    raw = []
    for name, content in contents.items():
        try:
            # The ranks of this save have just pickled it.
            values[name] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        except Exception:  # noqa: BLE001 - torch.load may raise anything for another format
            values[name] = content
            raw.append(name)
    return values, raw
