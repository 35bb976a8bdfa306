"""Saves behind a training, measured: every contestant in every round, as in ``bench_rounds``.

Each time is taken beside a memcpy of the same state into memory that was used before, just before
the save: what the machine does at that moment hits both.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from async_contestants import AsyncContestant, Calls
from async_training import Training
from bench_cases import Case
from bench_probes import tree_watched
from bench_state import LocalTensor, Work, make_side

_MEMCPY_CALLS = 3
_TRAINING_SECONDS = 0.6


@dataclass(slots=True)
class Result:
    """What one contestant did. Seconds, one entry a round; bytes.

    Attributes:
        name: of the contestant.
        family: of the contestant.
        detail: its settings.
        copies_first: the state may be changed as soon as the call returns.
        first_blocked: of the first save, which allocates.
        memcpy: one copy of the state just before the save.
        blocked: until the call returned.
        captured: until the state could be changed.
        total: until the checkpoint was there.
        lost: training time that a save costs: what the call took, and what the steps were slower.
        slowed: steps per second while the save goes on, of those before.
        in_flight: until the checkpoint was there while a training went on.
        peak_bytes: memory beyond the state, helper processes included, in the first save.
        failed: why it is out.
    """

    name: str
    family: str
    detail: str
    copies_first: bool
    first_blocked: float | None = None
    memcpy: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    failed: str | None = None


@dataclass(slots=True, eq=False)
class _Entrant:
    contestant: AsyncContestant
    calls: Calls
    state: Any
    result: Result


class AsyncRun:
    """All contestants on one rank.

    Args:
        case: the state.
        folder: empty; checkpoints come and go in it.
        say: called with a line of progress.
    """

    def __init__(self, case: Case, folder: Path, say: Callable[[str], None]) -> None:
        self._case = case
        self._folder = folder
        self._say = say
        side = make_side(1, 0, 1)
        self._work = Work.make(case, side, side)
        self._number = 0
        self._training = Training()

    def measure(self, contestants: Sequence[AsyncContestant], deadline: float) -> dict[str, Any]:
        """Everything; the two kinds of rounds share the time.

        Args:
            contestants: to measure.
            deadline: ``time.monotonic()`` after which no further round begins.
        """
        entrants = []
        for contestant in contestants:
            self._say(f"async: warm-up, {contestant.name}")
            entrant = self._enter(contestant)
            self._guarded(entrant, self._warm_up)
            entrants.append(entrant)
        begin = time.monotonic()
        half = begin + (deadline - begin) / 2
        self._rounds("round", entrants, self._round, half)
        trained = [entrant for entrant in entrants if entrant.contestant.in_training]
        self._rounds("round in a training", trained, self._training_round, deadline)
        for entrant in entrants:
            entrant.calls.close()
        return {
            "title": self._case.title,
            "num_bytes": self._case.num_bytes,
            "contestants": [asdict(entrant.result) for entrant in entrants],
        }

    def _rounds(
        self,
        what: str,
        entrants: Sequence[_Entrant],
        step: Callable[[_Entrant], None],
        deadline: float,
    ) -> None:
        for number in range(self._case.rounds):
            if number > 0 and time.monotonic() > deadline:
                self._say(f"async: out of time after {number} of {self._case.rounds}")
                break
            self._say(f"async: {what} {number + 1} of {self._case.rounds}")
            first = number % len(entrants)
            for entrant in (*entrants[first:], *entrants[:first]):
                if entrant.result.failed is None:
                    self._guarded(entrant, step)

    def _enter(self, contestant: AsyncContestant) -> _Entrant:
        result = Result(
            contestant.name, contestant.family, contestant.detail, contestant.copies_first
        )
        calls = contestant.open()
        return _Entrant(contestant, calls, calls.prepare(_by_key(self._work.saved)), result)

    def _guarded(self, entrant: _Entrant, step: Callable[[_Entrant], None]) -> None:
        try:
            step(entrant)
        # DCP's is no Exception.
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - that contestant is out
            entrant.result.failed = f"{type(error).__name__}: {error}"
            self._say(f"async: {entrant.result.name} failed: {entrant.result.failed}")
        finally:
            for left in self._folder.iterdir():
                shutil.rmtree(left, ignore_errors=True)

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self._folder / f"async-{self._number}"
        folder.mkdir()
        return folder

    def _warm_up(self, entrant: _Entrant) -> None:
        """Imports; then the first save in full size: memory, and that it saved what it captured."""
        tiny = self._case.tiny()
        side = make_side(1, 0, 1)
        small = Work.make(tiny, side, side)
        state = entrant.calls.prepare(_by_key(small.saved))
        entrant.calls.begin(self._new_folder(), state).finish()
        folder = self._new_folder()
        with tree_watched() as watch:
            begin = time.perf_counter()
            begun = entrant.calls.begin(folder, entrant.state)
            entrant.result.first_blocked = time.perf_counter() - begin
            begun.wait_captured()
            for tensor in self._work.saved:
                tensor.data.fill_(0)
            begun.finish()
        entrant.result.peak_bytes = watch.extra_bytes
        for tensor in self._work.saved:
            tensor.fill()
        self._work.clear_target()
        entrant.calls.load(folder, _by_key(self._work.target))
        if not self._work.target_is_right:
            raise RuntimeError("what it saved is not what it captured")

    def _memcpy(self) -> float:
        times = []
        for _ in range(_MEMCPY_CALLS):
            begin = time.perf_counter()
            for source, target in zip(self._work.saved, self._work.target, strict=True):
                target.data.copy_(source.data)
            times.append(time.perf_counter() - begin)
        return median(times)  # the save has one try, too

    def _round(self, entrant: _Entrant) -> None:
        folder = self._new_folder()
        gc.collect()
        memcpy = self._memcpy()
        begin = time.perf_counter()
        begun = entrant.calls.begin(folder, entrant.state)
        blocked = time.perf_counter() - begin
        begun.wait_captured()
        captured = time.perf_counter() - begin
        begun.finish()
        total = time.perf_counter() - begin
        result = entrant.result
        result.memcpy.append(memcpy)
        result.blocked.append(blocked)
        result.captured.append(captured)
        result.total.append(total)

    def _training_round(self, entrant: _Entrant) -> None:
        folder = self._new_folder()
        gc.collect()
        with self._training.one_thread():
            speed = self._training.speed(_TRAINING_SECONDS)
            begin = time.perf_counter()
            begun = entrant.calls.begin(folder, entrant.state)
            blocked = time.perf_counter() - begin
            steps, during = self._training.until(begun.done)
            begun.finish()
        result = entrant.result
        result.lost.append(blocked + during - steps / speed)
        result.slowed.append(steps / during / speed if during else 1.0)
        result.in_flight.append(blocked + during)


def _by_key(tensors: Sequence[LocalTensor]) -> Mapping[str, torch.Tensor]:
    return {tensor.key: tensor.data for tensor in tensors}
