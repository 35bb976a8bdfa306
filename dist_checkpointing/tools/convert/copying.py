"""Moves boxes from a source into files, by a few threads that each hold a little at a time."""

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
from dist_checkpointing.format.geometry import Box, ravel_offset
from dist_checkpointing.tools.convert.memory import Spending
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
class Landing:
    """Where a tensor is written.

    Attributes:
        tensor: which.
        descriptor: of the file.
        start: of its values in C order, in bytes.
    """

    tensor: PlannedTensor
    descriptor: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    landing: Landing
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.landing.tensor.widest_itemsize


def batches(landings: Sequence[Landing], box_bytes: int) -> Iterator[list[_Piece]]:
    """What is read at once: one large box, or many small ones."""
    batch: list[_Piece] = []
    size = 0
    for landing in landings:
        for box in runs(landing.tensor, box_bytes):
            piece = _Piece(landing, box)
            if batch and (size + piece.num_bytes > box_bytes or len(batch) >= _MOST_TOGETHER):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.num_bytes
    if batch:
        yield batch


def pump(
    source: Source,
    landings: Sequence[Landing],
    spending: Spending,
    stop: threading.Event,
    report: Callable[[int], None],
) -> None:
    """Copy tensors into files that have room for them.

    Args:
        source: of the tensors.
        landings: in the order in which they are copied.
        spending: threads and memory.
        stop: ends it when set.
        report: called with the number of bytes written since the last call.

    Raises:
        CheckpointingException: if ``stop`` was set.
        Exception: the first error of any thread, when all have ended.
    """

    def move(batch: Sequence[_Piece]) -> None:
        if stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        values = source.read([(p.landing.tensor.source.key, p.box) for p in batch])
        for number, piece in enumerate(batch):
            tensor = piece.landing.tensor
            data, values[number] = cast(values[number], tensor.dtype.torch), torch.empty(0)
            start = ravel_offset(piece.box.offset, tensor.shape) * tensor.dtype.itemsize
            write_tensor(piece.landing.descriptor, data, piece.landing.start + start)
            report(data.nbytes)

    pool = ThreadPoolExecutor(spending.threads, "convert")
    running: set[Future[None]] = set()
    try:
        for batch in batches(landings, spending.box_bytes):
            if len(running) >= 2 * spending.threads:
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
