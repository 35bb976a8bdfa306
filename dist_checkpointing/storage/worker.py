"""The process that writes beside the training, from both sides."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import Any, Final

import torch

from dist_checkpointing.comm.failures import Failure
from dist_checkpointing.errors import CheckpointingException, Finding, RankFailedError
from dist_checkpointing.planning import SavePlan
from dist_checkpointing.storage.driver import Written, write_plan
from dist_checkpointing.storage.protocol import StorageWriter, unreported
from dist_checkpointing.storage.shared_memory import SharedMemory, mapped
from dist_checkpointing.storage.staging import StagedPlanner, StagingBuffers

logger: logging.Logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1
_REPORT_SECONDS: Final = 0.05
_END_PATIENCE_SECONDS: Final = 10.0
# Not a multiprocessing.Process: that one imports __main__ again, and a daemon may not start it.
_BOOT: Final = """\
import sys
sys.path[:] = {path!r}
from dist_checkpointing.storage.worker import serve
serve({descriptor}, {parent})
"""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """Where a copy is: its first byte in the shared memory, its dtype and shape, in C order."""

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
        rank: Rank of the group that the part belongs to.
        writer: StorageWriter of the folder, set up.
        plan: SavePlan of the rank; None for that of the last job.
        memory: Descriptor in the training's process, and bytes, of the shared memory; None for that
            of the last job.
        data: For each row of the plan the place of its copy, or the pickled value.
    """

    rank: int
    writer: StorageWriter
    plan: SavePlan | None
    memory: tuple[int, int] | None
    data: list[StagedTensor | bytes]


class WriterProcess:
    """One process that writes what this rank has staged: spawned once, and used for every save.

    It knows nothing of other ranks, of the GPU, nor of ``__main__``; it ends with this process,
    however this one ends. Nothing is forked.

    Args:
        buffers: shared; all that is written has been staged there.
    """

    def __init__(self, buffers: StagingBuffers) -> None:
        self._buffers = buffers
        self._process: subprocess.Popen[bytes] | None = None
        # Weakly: outgrown memory must not stay because it has been sent.
        self._sent_memory: weakref.ref[SharedMemory] | None = None
        self._sent_plan: SavePlan | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if there is no worker."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a worker, unless there is one that still lives. It gets ready by itself.

        Raises:
            OSError: if it cannot be started.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return
            logger.warning("the worker process %s; another one is started", _end(self._process))
            self.close()
        self._channel, theirs = Pipe()
        with theirs:
            path, descriptor = list(map(str, sys.path)), theirs.fileno()
            boot = _BOOT.format(path=path, descriptor=descriptor, parent=os.getpid())
            self._process = subprocess.Popen(  # noqa: S603 - our own code
                [os.fsdecode(get_executable()), "-c", boot],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # Signals to the group of this process, such as Ctrl-C, are not meant for it.
                start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        self._stop = weakref.finalize(self, _stop, self._process, self._channel, os.getpid())

    def close(self) -> None:
        """End the worker."""
        self._sent_memory = self._sent_plan = None
        if self._process is not None:
            self._process = None
            self._stop()

    def require_sendable(self, strategy: object, writer: StorageWriter | None) -> None:
        """Refuse what a process cannot write.

        Raises:
            CheckpointingException: saying why.
        """
        if writer is None:
            raise _refused(f"{strategy} is not made of a StorageWriter")
        _pickled(unreported(writer), f"{strategy}: its {type(writer).__name__}")

    def write_plan(
        self, plan: SavePlan, planner: StagedPlanner, writer: StorageWriter, rank: int
    ) -> Written:
        """``storage.write_plan`` in the worker.

        Raises:
            RankFailedError: if the worker fails or dies, with its traceback or exit code.
            CheckpointingException: what the writer raised, or for a value that cannot be sent.
        """
        self.start()
        assert self._process is not None
        memory = self._buffers.shared_memory
        job = _pickled(self._job(plan, planner, writer, rank, memory), "the plan")
        try:
            self._channel.send_bytes(job)
            self._sent_plan = plan
            self._sent_memory = None if memory is None else weakref.ref(memory)
            while isinstance(answer := self._receive(self._process), int):
                writer.report(answer)
        except (EOFError, OSError) as error:
            how = _end(self._process)
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

    def _job(
        self,
        plan: SavePlan,
        planner: StagedPlanner,
        writer: StorageWriter,
        rank: int,
        memory: SharedMemory | None,
    ) -> Job:
        data: list[StagedTensor | bytes] = []
        for row, value in enumerate(planner.data):
            offset = self._buffers.offset_of(value) if isinstance(value, torch.Tensor) else None
            if offset is None:
                data.append(_pickled(value, "the value", plan.items[row].index.fqn))
            else:
                data.append(StagedTensor(offset, value.dtype, tuple(value.shape)))
        known = self._sent_memory is not None and self._sent_memory() is memory
        place = None if known or memory is None else (memory.descriptor, memory.tensor.numel())
        # Without what a plan has worked out for itself.
        sent = None if plan is self._sent_plan else replace(plan)
        return Job(rank, unreported(writer), sent, place, data)

    def _receive(self, process: subprocess.Popen[bytes]) -> Any:
        """The next answer.

        Raises:
            EOFError: if there is no worker any more.
        """
        while not self._channel.poll(_LOOK_SECONDS):
            # A process forked by this one may hold the other end open: its silence says nothing.
            if process.poll() is not None and not self._channel.poll():
                raise EOFError
        return self._channel.recv()


def _stop(process: subprocess.Popen[bytes], channel: Connection, owner: int) -> None:
    if os.getpid() != owner:
        return  # forked from the one that started it
    # Between two saves there is nothing that it would have to bring to an end.
    process.kill()
    channel.close()
    process.wait()


def _end(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process that is about to end; how it ended, in words."""
    try:
        code = process.wait(_END_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code >= 0:
        return f"ended with exit code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, 'a signal')} (exit code {code})"


def _error_of(failure: Failure, rank: int) -> CheckpointingException:
    if failure.error is not None:
        failure.error.add_note(f"In the worker process:\n{failure.traceback.rstrip()}")
        return failure.error
    finding = Finding(failure.summary, ranks=(rank,))
    return RankFailedError("writing failed", [finding], {rank: failure.traceback})


def _refused(problem: str, key: str | None = None, remedy: str = "") -> CheckpointingException:
    finding = Finding(problem, key, remedy=f"{remedy}Choose worker='thread'.")
    return CheckpointingException("a worker process cannot write this", [finding])


def _pickled(value: object, what: str, key: str | None = None) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise _refused(f"{what} cannot be pickled: {error}", key) from error


# What runs in the worker.


def serve(descriptor: int, parent: int) -> None:
    """Write what comes over a connection for as long as there is somebody on its other side.

    Args:
        descriptor: file descriptor of this side of the connection.
        parent: process id of the training; this process never outlives it.
    """
    # The training decides when to stop; a launcher that signals every process means the training.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with Connection(descriptor) as channel:
        work = _Work(channel, parent)
        while True:
            try:
                channel.send_bytes(work.answer(channel.recv_bytes()))
            except (EOFError, ConnectionError):
                return  # the training is gone, perhaps in the middle of a job


def _end_with(parent: int) -> None:
    """End at once when the training is gone: nobody would commit what is written from then on."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


class _Work:
    """What the worker does, and keeps between jobs."""

    def __init__(self, channel: Connection, parent: int) -> None:
        self._channel = channel
        self._parent = parent
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plan: SavePlan | None = None

    def answer(self, job: bytes) -> bytes:
        try:
            return pickle.dumps(self._write(pickle.loads(job)))  # noqa: S301 - the training's own
        except Exception as error:  # noqa: BLE001 - the training must hear of it
            return pickle.dumps(Failure.of(error))

    def _write(self, job: Job) -> Written:
        if job.memory is not None:
            self._memory = torch.empty(0, dtype=torch.uint8)  # never both at once
            number, num_bytes = job.memory
            descriptor = os.open(f"/proc/{self._parent}/fd/{number}", os.O_RDWR)
            try:
                self._memory = mapped(descriptor, num_bytes)
            finally:
                os.close(descriptor)
        plan = self._plan = self._plan if job.plan is None else job.plan
        assert plan is not None
        data = [
            value.within(self._memory)
            if isinstance(value, StagedTensor)
            else _unpickled(value, plan, row)
            for row, value in enumerate(job.data)
        ]
        report = _Report(self._channel)
        job.writer.report = report.add
        written = write_plan(plan, StagedPlanner(plan, data), job.writer, job.rank)
        report.add(0, at_once=True)
        return written


def _unpickled(value: bytes, plan: SavePlan, row: int) -> Any:
    try:
        return pickle.loads(value)  # noqa: S301 - the training's own
    except Exception as error:
        problem = f"cannot be unpickled in the worker process: {error}"
        remedy = "Define its class in a module that can be imported. "
        raise _refused(problem, plan.items[row].index.fqn, remedy) from error


class _Report:
    """Tells how many bytes are written, not too often."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._num_bytes, self._last = 0, time.monotonic()

    def add(self, num_bytes: int, *, at_once: bool = False) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            is_due = at_once or time.monotonic() - self._last >= _REPORT_SECONDS
            if is_due and self._num_bytes:
                self._channel.send(self._num_bytes)
                self._num_bytes, self._last = 0, time.monotonic()
