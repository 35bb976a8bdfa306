"""The process that writes beside the training, seen from the training."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import Any, Final

import torch

from dist_checkpointing.comm.protocol import Failure
from dist_checkpointing.errors import CheckpointingException, Finding, RankFailedError
from dist_checkpointing.planning import SavePlan
from dist_checkpointing.storage.driver import Written
from dist_checkpointing.storage.protocol import StorageWriter, unreported
from dist_checkpointing.storage.shared_memory import SharedMemory
from dist_checkpointing.storage.staging import StagedPlanner, StagingBuffers

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.2
_END_PATIENCE_SECONDS: Final = 10.0
_BOOT: Final = """\
import sys
sys.path[:] = {path!r}
from dist_checkpointing.storage.worker_main import serve
serve({descriptor}, {parent})
"""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What comes before a job.

    Attributes:
        memory_bytes: size of new shared memory whose descriptor comes next; None for the last one.
    """

    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """Where a copy is: its first byte in the shared memory, its dtype and shape; it is in C order.

    It is the value of the plan's row number ``row``.
    """

    row: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The copy itself."""
        num_bytes = self.dtype.itemsize * torch.Size(self.shape).numel()
        return memory[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank writes.

    Attributes:
        rank: whose part it is.
        writer: of the folder, set up.
        plan: None for that of the last job.
        tensors: the copies in shared memory.
        others: row of the plan -> key and pickled value of everything else.
    """

    rank: int
    writer: StorageWriter
    plan: SavePlan | None
    tensors: list[StagedTensor]
    others: dict[int, tuple[str, bytes]]


class WriterProcess:
    """One process that writes what this rank has staged: spawned once, and used for every save.

    It knows nothing of other ranks, of the GPU, nor of ``__main__``; it ends with this process,
    however this one ends. Nothing is forked.

    Args:
        buffers: shared; all that is written has been staged there.
    """

    def __init__(self, buffers: StagingBuffers) -> None:
        self._buffers = buffers
        self._worker: _Worker | None = None
        # Weakly: outgrown memory must not stay because it has been sent.
        self._sent_memory: weakref.ref[SharedMemory] | None = None
        self._sent_plan: SavePlan | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if there is no worker."""
        return None if self._worker is None else self._worker.process.pid

    def start(self) -> None:
        """Have a worker: the same as before, if that still lives. It gets ready by itself.

        Raises:
            OSError: if there can be none.
        """
        if self._worker is not None:
            if self._worker.process.poll() is None:
                return
            logger.warning("the worker process %s; another one is started", self._worker.end())
            self.close()
        self._worker = _Worker()

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        self._sent_memory = self._sent_plan = None
        if worker is not None:
            worker.stop()

    def require_sendable(self, strategy: object, writer: StorageWriter | None) -> None:
        """Refuse what a process cannot write.

        Raises:
            CheckpointingException: saying why.
        """
        problem = None
        if writer is None:
            problem = "this strategy is not made of a StorageWriter"
        else:
            try:
                pickle.dumps(unreported(writer))
            except Exception as error:  # noqa: BLE001 - anything may go wrong in a pickle
                problem = f"its {type(writer).__name__} cannot be pickled: {error}"
        if problem is not None:
            finding = Finding(problem, found=str(strategy), remedy="Choose worker='thread'.")
            raise CheckpointingException("a worker process cannot write this", [finding])

    def write_plan(
        self, plan: SavePlan, planner: StagedPlanner, writer: StorageWriter, rank: int
    ) -> Written:
        """``storage.write_plan`` in the worker.

        Raises:
            RankFailedError: if the worker fails or dies, with its traceback or exit code.
            CheckpointingException: what the writer raised, or for a value that cannot be sent.
        """
        self.start()
        worker = self._worker
        assert worker is not None
        job = self._job(plan, planner, writer, rank)
        memory = self._buffers.shared_memory
        try:
            data = pickle.dumps(job)
        except Exception as error:
            finding = Finding(f"{type(error).__name__}: {error}", remedy="Choose worker='thread'.")
            raise CheckpointingException("a worker process cannot write this", [finding]) from error
        try:
            self._send(worker, memory, data)
            self._sent_plan = plan
            answer = worker.receive()
            while isinstance(answer, int):
                writer.report(answer)
                answer = worker.receive()
        except (EOFError, OSError) as error:
            how = worker.end()
            self.close()
            finding = Finding(f"the worker process that writes {how}", ranks=(rank,))
            raise RankFailedError("writing failed", [finding]) from error
        except BaseException:
            self.close()  # what it still says must not be taken for the next answer
            raise
        if isinstance(answer, Failure):
            self._sent_plan = self._sent_memory = None  # who knows how far it came
            raise _error_of(answer, rank)
        written: Written = answer
        return written

    def _job(self, plan: SavePlan, planner: StagedPlanner, writer: StorageWriter, rank: int) -> Job:
        tensors, others = [], {}
        for row, value in enumerate(planner.data):
            offset = self._buffers.offset_of(value) if isinstance(value, torch.Tensor) else None
            if offset is not None:
                tensors.append(StagedTensor(row, offset, value.dtype, tuple(value.shape)))
                continue
            key = plan.items[row].index.fqn
            try:
                others[row] = key, pickle.dumps(value)
            except Exception as error:
                problem = f"cannot be pickled: {error}"
                finding = Finding(problem, key, ranks=(rank,), remedy="Choose worker='thread'.")
                raise CheckpointingException("a worker process cannot write this", [finding]) from (
                    error
                )
        # Without what a plan has worked out for itself.
        sent = None if plan is self._sent_plan else replace(plan)
        return Job(rank, unreported(writer), sent, tensors, others)

    def _send(self, worker: _Worker, memory: SharedMemory | None, data: bytes) -> None:
        known = None if self._sent_memory is None else self._sent_memory()
        if memory is None or memory is known:
            worker.channel.send(Announcement(None))
        else:
            worker.channel.send(Announcement(memory.tensor.numel()))
            reduction.send_handle(worker.channel, memory.descriptor, worker.process.pid)
            self._sent_memory = weakref.ref(memory)
        worker.channel.send_bytes(data)


class _Worker:
    """A living worker and the way to it."""

    def __init__(self) -> None:
        self.channel, theirs = Pipe()
        with theirs:
            boot = _BOOT.format(
                path=list(map(str, sys.path)),
                descriptor=theirs.fileno(),
                parent=os.getpid(),
            )
            self.process = subprocess.Popen(  # noqa: S603 - our own code
                [os.fsdecode(get_executable()), "-c", boot],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Signals to the group of this process, such as Ctrl-C, are not meant for it.
                start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        self.stop = weakref.finalize(self, _stop, self.process, self.channel, os.getpid())

    def receive(self) -> Any:
        """The next answer.

        Raises:
            EOFError: if there is no worker any more.
        """
        while not self.channel.poll(_LOOK_SECONDS):
            # A process forked by this one may hold the other end open: its silence says nothing.
            if self.process.poll() is not None and not self.channel.poll():
                raise EOFError
        return self.channel.recv()

    def end(self) -> str:
        """How it ended, in words."""
        code = _ended(self.process)
        if code < 0:
            known = {int(number): number.name for number in signal.Signals}
            return f"was killed by {known.get(-code, 'a signal')} (exit code {code})"
        return f"ended with exit code {code}"


def _stop(process: subprocess.Popen[bytes], channel: Connection, owner: int) -> None:
    if os.getpid() != owner:
        return  # forked from the one that started it
    # Between two saves there is nothing that it would have to bring to an end.
    process.kill()
    channel.close()
    process.wait()


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that is about to end; its exit code."""
    try:
        return process.wait(_END_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _error_of(failure: Failure, rank: int) -> CheckpointingException:
    if failure.error is not None:
        failure.error.add_note(f"In the worker process:\n{failure.traceback.rstrip()}")
        return failure.error
    finding = Finding(failure.summary, ranks=(rank,))
    return RankFailedError("writing failed", [finding], {rank: failure.traceback})
