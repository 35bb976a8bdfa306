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

from dist_checkpointing.byte_sizes import in_batches
from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format.geometry import Box, ravel_offset
from dist_checkpointing.mapping import tensor_memory
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
        tensor: The tensor.
        descriptor: Descriptor of the file.
        start: Where its values begin in the file, in bytes; they follow in C order.
    """

    tensor: PlannedTensor
    descriptor: int
    start: int

    def boxes(self, most_bytes: int) -> Iterator[tuple[tuple[TensorInFile, Box], int]]:
        """The boxes in which it is copied, and the bytes that each takes."""
        for box in runs(self.tensor, most_bytes):
            yield (self, box), box.num_elements * self.tensor.widest_itemsize

    def write(self, box: Box, read: torch.Tensor) -> int:
        """Write the values of a box, and return their size."""
        values = cast(read, self.tensor.dtype.torch)
        before = ravel_offset(box.offset, self.tensor.shape) * self.tensor.dtype.itemsize
        write_tensor(self.descriptor, values, self.start + before)
        return values.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Copier:
    """Copies tensors into files that have room for them.

    Attributes:
        source: Source of the tensors.
        budget: Threads and memory.
        stop: Event that ends it when set.
        report: Function that is called with the number of bytes written since the last call.
    """

    source: Source
    budget: Budget
    stop: threading.Event
    report: Callable[[int], None]

    def copy(self, targets: Sequence[TensorInFile]) -> None:
        """Copy tensors, in this order.

        Raises:
            CheckpointingException: if ``stop`` was set.
            Exception: the first error of any thread, when all have ended.
        """
        most_bytes = self.budget.box_bytes
        boxes = (row for target in targets for row in target.boxes(most_bytes))
        pool = ThreadPoolExecutor(self.budget.threads, "convert")
        running: set[Future[None]] = set()
        try:
            for batch in in_batches(boxes, most_bytes, _MOST_TOGETHER):
                if len(running) >= 2 * self.budget.threads:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                running.add(pool.submit(self._move, batch))
            for future in running:
                future.result()
        except BaseException:
            self.stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _move(self, batch: Sequence[tuple[TensorInFile, Box]]) -> None:
        """What is read at once: one large box, or many small ones."""
        if self.stop.is_set():
            raise CheckpointingException("the conversion was interrupted")
        values = self.source.read([(target.tensor.source.key, box) for target, box in batch])
        for number, (target, box) in enumerate(batch):
            read, values[number] = values[number], torch.empty(0)  # freed one after the other
            self.report(target.write(box, read))


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor with another dtype; itself if it has it."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def write_tensor(descriptor: int, tensor: torch.Tensor, position: int) -> None:
    """Write the values of a tensor, in C order, to a place in a file."""
    array = np.ascontiguousarray(tensor_memory.as_numpy(tensor)).reshape(-1)
    view = memoryview(array.view(np.uint8))  # type: ignore[arg-type]
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
