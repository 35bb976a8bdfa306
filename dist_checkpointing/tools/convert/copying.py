"""Copies boxes from a source into files, by a few threads that each hold one batch at a time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch

from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.byte_sizes import in_batches
from dist_checkpointing.format.geometry import Box, ravel_offset
from dist_checkpointing.tools.convert.memory import Budget
from dist_checkpointing.tools.convert.plan import PlannedTensor, runs
from dist_checkpointing.tools.convert.sources import Source

_MOST_TOGETHER = 512


@contextmanager
def stopping(stop: threading.Event) -> Iterator[None]:
    """Set the event at Ctrl-C, so that threads end soon and not after all their work."""
    previous: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        stop.set()
        previous(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass(frozen=True, slots=True, eq=False)
class TensorInFile:
    """Where a tensor is written.

    Attributes:
        tensor: the tensor.
        descriptor: descriptor of the file.
        start: where its values begin in the file, in bytes; they follow in C order.
    """

    tensor: PlannedTensor
    descriptor: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    target: TensorInFile
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.target.tensor.widest_itemsize


def batches(targets: Sequence[TensorInFile], box_bytes: int) -> Iterator[list[_Piece]]:
    """What is read at once: one large box, or many small ones."""
    pieces = (_Piece(t, box) for t in targets for box in runs(t.tensor, box_bytes))
    return in_batches(((p, p.num_bytes) for p in pieces), box_bytes, _MOST_TOGETHER)


def copy_tensors(
    source: Source,
    targets: Sequence[TensorInFile],
    budget: Budget,
    stop: threading.Event,
    report: Callable[[int], None],
) -> None:
    """Copy tensors into files that have room for them.

    Args:
        source: has the tensors.
        targets: where they are written, in the order in which they are copied.
        budget: threads and memory.
        stop: ends it when set.
        report: called with the number of bytes written since the last call.

    Raises:
        CheckpointingException: if ``stop`` was set.
        Exception: the first error of any thread, when all have ended.
    """

    def move(batch: Sequence[_Piece]) -> None:
        if stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        values = source.read([(p.target.tensor.source.key, p.box) for p in batch])
        for number, piece in enumerate(batch):
            tensor = piece.target.tensor
            data, values[number] = cast(values[number], tensor.dtype.torch), torch.empty(0)
            start = ravel_offset(piece.box.offset, tensor.shape) * tensor.dtype.itemsize
            write_tensor(piece.target.descriptor, data, piece.target.start + start)
            report(data.nbytes)

    pool = ThreadPoolExecutor(budget.threads, "convert")
    running: set[Future[None]] = set()
    try:
        for batch in batches(targets, budget.box_bytes):
            if len(running) >= 2 * budget.threads:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
            running.add(pool.submit(move, batch))
        for future in running:
            future.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor with another dtype; itself if it has it."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def write_tensor(descriptor: int, tensor: torch.Tensor, position: int) -> None:
    """Write the values of a tensor, in C order, to a place in a file."""
    array = np.ascontiguousarray(dtypes.as_numpy(tensor)).reshape(-1)
    view = memoryview(array.view(np.uint8))  # type: ignore[arg-type]
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
