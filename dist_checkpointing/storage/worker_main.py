"""The process that writes beside the training: what runs in it."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from dist_checkpointing.comm.protocol import Failure
from dist_checkpointing.errors import CheckpointingException, Finding
from dist_checkpointing.planning import SavePlan
from dist_checkpointing.storage.driver import Written, write_plan
from dist_checkpointing.storage.shared_memory import mapped
from dist_checkpointing.storage.staging import StagedPlanner
from dist_checkpointing.storage.worker import Announcement, Job

_LOOK_SECONDS: Final = 0.1
_REPORT_SECONDS: Final = 0.05


def serve(descriptor: int, parent: int) -> None:
    """Write what comes over a connection for as long as there is somebody on its other side.

    Args:
        descriptor: of this side of the connection.
        parent: process id of the training; this process never outlives it.
    """
    # The training decides when to stop; a launcher that signals every process means the training.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with Connection(descriptor) as channel:
        desk = _Desk(channel)
        while True:
            try:
                desk.work_off(pickle.loads(channel.recv_bytes()))  # noqa: S301 - the training's own
            except (EOFError, ConnectionError):
                return  # the training is gone, perhaps in the middle of a job


def _end_with(parent: int) -> None:
    """End at once when the training is gone: nobody would commit what is written from then on."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


class _Desk:
    """What is kept between jobs."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plan: SavePlan | None = None

    def work_off(self, announced: Announcement) -> None:
        """Do the job that comes next, and say how that went."""
        descriptor = None
        if announced.memory_bytes is not None:
            descriptor = reduction.recv_handle(self._channel)
        data = self._channel.recv_bytes()
        answer: bytes | None = None
        try:
            if descriptor is not None and announced.memory_bytes is not None:
                self._map(descriptor, announced.memory_bytes)
            answer = pickle.dumps(self._write(pickle.loads(data)))  # noqa: S301
        except Exception as error:  # noqa: BLE001 - the training must hear of it
            answer = pickle.dumps(Failure.of(error))
        self._channel.send_bytes(answer)

    def _map(self, descriptor: int, num_bytes: int) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)  # never both at once
        try:
            self._memory = mapped(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def _write(self, job: Job) -> Written:
        plan = self._plan = self._plan if job.plan is None else job.plan
        assert plan is not None
        data: list[Any] = [None] * len(plan.table)
        for staged in job.tensors:
            data[staged.row] = staged.within(self._memory)
        for row, (key, pickled) in job.others.items():
            data[row] = _unpickled(key, pickled)
        report = _Report(self._channel)
        job.writer.report = report.add
        written = write_plan(plan, StagedPlanner(plan, data), job.writer, job.rank)
        report.flush()
        return written


def _unpickled(key: str, pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301 - the training's own
    except Exception as error:
        finding = Finding(
            f"cannot be unpickled in the worker process: {error}",
            key,
            remedy="Define its class in a module that can be imported, or choose worker='thread'.",
        )
        raise CheckpointingException("a worker process cannot write this", [finding]) from error


class _Report:
    """Tells how many bytes are written, not too often."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._num_bytes, self._last = 0, time.monotonic()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            if time.monotonic() - self._last < _REPORT_SECONDS:
                return
        self.flush()

    def flush(self) -> None:
        with self._lock:
            if self._num_bytes:
                self._channel.send(self._num_bytes)
            self._num_bytes, self._last = 0, time.monotonic()
