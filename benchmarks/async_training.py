"""A training step that keeps one core busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_SIZE = 384


class Training:
    """Matrix products of one thread, a few milliseconds a step: no state that is saved."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weight = torch.randn(_SIZE, _SIZE, generator=generator) / _SIZE**0.5
        self._x = torch.randn(_SIZE, _SIZE, generator=generator)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Let torch use one thread, and warm up."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._step()
            yield
        finally:
            torch.set_num_threads(before)

    def speed(self, seconds: float) -> float:
        """Steps a second when nothing else goes on."""
        end = time.perf_counter() + seconds
        steps, taken = self.until(lambda: time.perf_counter() >= end)
        return steps / taken

    def until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Train until something is done: number of steps, seconds."""
        begin, steps = time.perf_counter(), 0
        while not done():
            self._step()
            steps += 1
        return steps, time.perf_counter() - begin

    def _step(self) -> None:
        self._x = torch.nn.functional.normalize(self._weight @ self._x)
