"""A save whose data is copied, so that writing it needs neither the caller nor the caller's state.

The line of ``save`` is cut after the plan. ``capture`` and ``write_own`` concern this rank alone
and may run in any thread; ``complete`` talks to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.mapping import ShardedBase, ShardedTensor, is_main_replica
from dist_checkpointing.mapping.nesting import flatten, path_text
from dist_checkpointing.planning import SavePlan
from dist_checkpointing.serialization.save_job import BegunSave
from dist_checkpointing.storage.driver import Written, finish_write, prepare_write, write_plan
from dist_checkpointing.storage.protocol import StorageWriter
from dist_checkpointing.storage.staging import (
    ChangeDetector,
    StagedPlanner,
    StagingBuffers,
    detached_copy,
    stage_plan,
)
from dist_checkpointing.strategies.base import AsyncSaveShardedStrategy

PlanWriter = Callable[[SavePlan, StagedPlanner, StorageWriter, int], Written]
"""``storage.write_plan``, or what has the same effect in another process."""


def stage(
    begun: BegunSave,
    buffers: StagingBuffers,
    comm: Comm,
    *,
    step: int | None = None,
    write: PlanWriter = write_plan,
) -> StagedSave:
    """Get ready to copy. Collective, after ``begun.claim``.

    Args:
        begun: the save.
        buffers: for the copies.
        comm: the ranks that save together.
        step: what the save is for.
        write: writes what this rank has to write.

    Raises:
        CheckpointingException: if the buffers are in use, or the writer cannot get ready.
    """
    with comm.agreed("staging the save"):
        generation = buffers.take()
    try:
        plan = None
        if begun.planned is not None and begun.work.writer is not None:
            plan = prepare_write(begun.planned, begun.work.writer, comm)
    except BaseException:
        buffers.give_back()
        raise
    stamp = xxhash.xxh3_64_intdigest(f"{begun.attempt_id} {step}".encode()) >> 2
    return StagedSave(begun, plan, buffers, generation, stamp, write, is_coordinator=comm.rank == 0)


class StagedSave:
    """A save that is cut after the plan; see ``stage``.

    Attributes:
        begun: the save itself.
        num_bytes: of this rank, to copy and to write.
    """

    def __init__(
        self,
        begun: BegunSave,
        plan: SavePlan | None,
        buffers: StagingBuffers,
        generation: int,
        stamp: int,
        write: PlanWriter,
        *,
        is_coordinator: bool,
    ) -> None:
        self.begun = begun
        self._plan = plan
        self._buffers, self._generation, self._stamp = buffers, generation, stamp
        self._write_plan = write
        self._is_coordinator = is_coordinator
        self._common: dict[Any, Any] = {}
        self._objects: Any = None
        self._leaves: Any = None
        self._written = Written((), b"", b"", ())
        self._finalize_fns: Sequence[Callable[[], None]] = ()
        self._error: Exception | None = None
        self._is_lost = False
        self.num_bytes = 0 if plan is None else plan.num_bytes

    def watch(self, *, contents: bool) -> ChangeDetector:
        """Get ready for a ``capture`` by another thread: what the state is now, to check it then.

        Args:
            contents: see ``ChangeDetector``.
        """
        tensors: dict[str, list[torch.Tensor]] = {}
        for leaf in self.begun.work.by_strategy.values():
            if isinstance(leaf.data, torch.Tensor):
                tensors.setdefault(leaf.key, []).append(leaf.data)
        if self._is_coordinator:
            common, _ = flatten(self.begun.work.common)
            for path, value in common.items():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(path_text(path), []).append(value)
        self._buffers.follow(tensor for held in tensors.values() for tensor in held)
        return ChangeDetector(tensors, contents=contents)

    def capture(self) -> None:
        """Copy what this rank will write, and let go of the caller's state."""
        begun = self.begun
        work = begun.work
        if self._is_coordinator:
            self._common = detached_copy(work.common)
        if work.by_common:
            self._objects = work.parts.nested(_copied_objects(work.by_common))
        if begun.planned is not None:
            assert self._plan is not None
            planner = stage_plan(self._plan, begun.planned.planner, self._buffers)
            begun.planned = replace(begun.planned, planner=planner)
        else:
            self._leaves = work.parts.nested(self._copied_leaves())
        begun.forget_state()

    def _copied_leaves(self) -> dict[Any, ShardedBase]:
        """For a strategy of a third party: which of its leaves it writes, only it knows."""
        leaves = self.begun.work.by_strategy
        tensors = {
            path: leaf.data for path, leaf in leaves.items() if isinstance(leaf.data, torch.Tensor)
        }
        sizes = [tensor.nbytes for tensor in tensors.values()]
        copies = self._buffers.fill(sizes, tensors.values())
        copied = dict(zip(tensors, copies, strict=True))
        result = _copied_objects(leaves)
        for path, leaf in result.items():
            if isinstance(leaf, ShardedTensor):
                leaf.data = copied.get(path)
        return result

    def write_own(self) -> None:
        """Write what this rank has to write. Not collective.

        An error is kept for ``complete``, which tells it to all ranks.
        """
        try:
            self._write_own()
        except Exception as error:  # noqa: BLE001 - all ranks must hear of it
            self._error = error

    def lose(self, error: Exception) -> None:
        """Let ``complete`` raise this: there is no usable copy, and no second try would help."""
        self._error = error
        self._is_lost = True

    def _write_own(self) -> None:
        if self._error is not None:
            return
        begun = self.begun
        strategy, folder = begun.work.strategy, begun.work.folder
        with begun.meter.phase("writing"):
            begun.meter.expect(self.num_bytes)
            is_coordinator = self._is_coordinator
            files = begun.write_common(self._common, self._objects, is_coordinator=is_coordinator)
            if begun.planned is not None and begun.work.writer is not None:
                assert self._plan is not None
                rank = begun.rank
                planner, writer = begun.planned.planner, begun.work.writer
                assert isinstance(planner, StagedPlanner)
                written = self._write_plan(self._plan, planner, writer, rank)
                self._written = replace(written, files=(*written.files, *files))
            elif isinstance(strategy, AsyncSaveShardedStrategy):
                request = strategy.async_save(self._leaves, folder)
                request.execute()
                self._finalize_fns = tuple(request.finalize_fns)
            else:
                strategy.save(self._leaves, folder)

    def complete(self, comm: Comm) -> None:
        """Finish and commit, or raise what failed on any rank. Collective."""
        begun = self.begun
        try:
            with comm.agreed("writing"):
                if self._error is not None:
                    raise self._error
                self._check_generation()
            if not comm.all_same(self._stamp):
                finding = Finding(
                    "ranks finalize different saves, or named different steps",
                    path=str(begun.work.folder),
                    remedy="Every rank makes the same calls in the same order.",
                )
                raise CheckpointingException("the staged data is not of one save", [finding])
            if begun.planned is not None and begun.work.writer is not None:
                begun.finished = finish_write(begun.planned, self._written, begun.work.writer, comm)
            for finalize in self._finalize_fns:
                with comm.agreed("finishing the write"):
                    finalize()
            begun.commit(comm)
        except BaseException as error:
            begun.give_up(error)
            raise

    def _check_generation(self) -> None:
        if self._buffers.generation != self._generation:
            finding = Finding("the staging buffers have been used for another save since")
            raise CheckpointingException("the staged data is gone", [finding])

    def start_over(self, comm: Comm) -> None:
        """Get ready to write the same copies once more, after a failure. Collective."""
        with comm.agreed("writing once more"):
            if self._is_lost:
                assert self._error is not None
                raise self._error
        self.begun.claim(comm)
        self.begun.secure(comm)
        self._error = None
        if self.begun.planned is not None and self.begun.work.writer is not None:
            self._plan = prepare_write(self.begun.planned, self.begun.work.writer, comm)

    def close(self) -> None:
        """Free the buffers for the next save."""
        self._buffers.give_back()


def _copied_objects(leaves: Any) -> dict[Any, ShardedBase]:
    """Leaves of their own, with copies of the objects that will be written."""
    result: dict[Any, ShardedBase] = {}
    for path, leaf in leaves.items():
        copied = leaf.without_data()
        if not isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            copied.data = detached_copy(leaf.data)
        result[path] = copied
    return result
