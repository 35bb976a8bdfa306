"""A save whose data is copied, so that writing it needs neither the caller nor the caller's state.

``save`` is cut after the plan. ``capture`` and ``write_own`` concern this rank alone
and may run in any thread; ``complete`` talks to the other ranks.
"""

from __future__ import annotations

import logging

import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, RankFailedError
from dist_checkpointing.serialization.save_job import SaveJob
from dist_checkpointing.storage.staging import ChangeDetector, StagingBuffers

logger: logging.Logger = logging.getLogger(__name__)


class StagedSave:
    """A save that is cut after the plan.

    Args:
        job: the save, which has claimed its folder.
        buffers: memory for the copies.
        step: what the save is for.
    """

    def __init__(self, job: SaveJob, buffers: StagingBuffers, step: int | None = None) -> None:
        self._job = job
        self._buffers = buffers
        self._holds_buffers = False
        self._stamp = xxhash.xxh3_64_intdigest(f"{job.attempt_id} {step}".encode()) >> 2
        self._error: Exception | None = None
        self._is_lost = False

    def get_ready(self, comm: Comm) -> None:
        """Get ready to copy. The first thing in the body of an agreement.

        Raises:
            CheckpointingException: if the buffers are in use, or the writer cannot get ready.
        """
        self._job.get_ready(comm)
        self._buffers.take()
        self._holds_buffers = True

    def watch(self) -> ChangeDetector:
        """Get ready for a ``capture`` by another thread: what the state is now, to compare."""
        tensors = self._job.own.tensors()
        self._buffers.follow(tensor for held in tensors.values() for tensor in held)
        return ChangeDetector(tensors)

    def capture(self) -> None:
        """Copy what this rank will write, and let go of the caller's state."""
        self._job.capture(self._buffers)

    def write_own(self) -> None:
        """Write what this rank has to write. Not collective.

        An error is kept for ``complete``, which tells it to all ranks.
        """
        if self._error is not None:
            return
        try:
            self._job.write_own()
        except Exception as error:  # noqa: BLE001 - all ranks must hear of it
            self._error = error

    def lose(self, error: Exception) -> None:
        """Let ``complete`` raise this: there is no usable copy, and no second try would help."""
        self._error = error
        self._is_lost = True

    def complete(self, comm: Comm) -> None:
        """Finish and commit, or raise what failed on any rank. Collective."""
        job = self._job
        try:
            job.finish(comm, self._own_number)
            job.commit(comm)
        except BaseException as error:
            job.give_up(error)
            raise

    def _own_number(self) -> int:
        if self._error is not None:
            raise self._error
        return self._stamp

    def write_and_complete(self, comm: Comm, retries: int) -> None:
        """Secure, write, finish and commit; all of it once more for every retry. Collective."""
        for tries_left in range(retries, -1, -1):
            try:
                if tries_left < retries:
                    self._start_over(comm)
                else:
                    self._job.secure(comm)
                self.write_own()
                self.complete(comm)
            except CheckpointingException as error:
                self._job.give_up(error)
                somebody_is_gone = isinstance(error, RankFailedError) and error.silent_ranks
                if not tries_left or somebody_is_gone:
                    raise
                logger.warning("writing once more (%d tries left): %s", tries_left, error)
            else:
                return

    def _start_over(self, comm: Comm) -> None:
        """Get ready to write the same copies once more, after a failure. Collective."""
        with comm.agreed("writing once more"):
            if self._is_lost:
                assert self._error is not None
                raise self._error
        # The folder was cleared away: claim it again, and get ready again.
        self._job.claim(comm)
        self._job.secure(comm)
        self._error = None
        with comm.agreed("writing once more"):
            self._job.get_ready(comm)

    def close(self) -> None:
        """Free the buffers for the next save."""
        if self._holds_buffers:
            self._holds_buffers = False
            self._buffers.give_back()
