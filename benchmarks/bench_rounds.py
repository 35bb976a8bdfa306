"""One case, measured: every contestant in every round, A B C, B C A, C A B, ..."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_cases import Case
from bench_contestants import Calls, Contestant
from bench_probes import folder_size, peak_memory, read_bytes
from bench_state import Side, Work, make_side
from bench_world import ContestantFailedError, World


@dataclass(slots=True)
class Result:
    """What one contestant did in one case.

    Attributes:
        name: of the contestant.
        family: of the contestant.
        detail: its settings.
        seconds: "save" and "load" -> the fastest call of each counted round.
        warm_up_seconds: the same of the round that does not count.
        peak_bytes: "save" and "load" -> anonymous memory beyond the state, on the worst rank.
        num_files: of a checkpoint.
        stored_bytes: of a checkpoint.
        needed_bytes: of all ranks' tensors that are loaded.
        read_bytes: what read calls returned during one load; None if it reads through a map.
        failed: why it is out.
    """

    name: str
    family: str
    detail: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"save": [], "load": []})
    warm_up_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    num_files: int = 0
    stored_bytes: int = 0
    needed_bytes: int = 0
    read_bytes: int | None = None
    failed: str | None = None


@dataclass(slots=True, eq=False)
class _Entrant:
    contestant: Contestant
    calls: Calls
    result: Result


class CaseRun:
    """One case on one rank; every method is collective.

    Args:
        case: what to measure.
        world: the ranks.
        folder: empty; checkpoints come and go in it.
        calls: back-to-back calls a round, of which the fastest counts; with 1 the warm-up is
            shorter too, and its memory includes what a first call imports.
        say: called with a line of progress.
    """

    def __init__(
        self, case: Case, world: World, folder: Path, calls: int, say: Callable[[str], None]
    ) -> None:
        self.case = case
        self._world = world
        self._folder = folder
        self._num_calls = calls
        self._say = say
        self._number = 0
        self._last: Path | None = None
        self._saving = make_side(case.save_ranks, world.rank, world.size)
        self._loading = make_side(case.load_ranks, world.rank, world.size)
        self._work = Work.make(case, self._saving, self._loading)

    def measure(self, contestants: Sequence[Contestant], deadline: float) -> dict[str, Any]:
        """Everything about the case.

        Args:
            contestants: all there are; those that do not fit the case are left out.
            deadline: ``time.monotonic()`` after which no further round begins.
        """
        entrants = [
            self._enter(c)
            for c in contestants
            if c.family in self.case.families and c.takes_part(self._work)
        ]
        for entrant in entrants:
            self._say(f"{self.case.name}: warm-up, {entrant.result.name} {entrant.result.detail}")
            self._guarded(entrant, self._warm_up)
        racing = self._with_best_settings([e for e in entrants if not e.result.failed])
        for number in range(self.case.rounds):
            late = number > 0 and time.monotonic() > deadline
            if self._world.from_rank0(late):
                self._say(f"{self.case.name}: out of time after {number} rounds")
                break
            self._say(f"{self.case.name}: round {number + 1} of {self.case.rounds}")
            first = number % max(1, len(racing))
            for entrant in racing[first:] + racing[:first]:
                if not entrant.result.failed:
                    self._guarded(entrant, self._round)
        settled = {id(entrant) for entrant in racing}
        return {
            "name": self.case.name,
            "title": self.case.title,
            "num_bytes": self.case.num_bytes,
            "num_tensors": self.case.num_tensors,
            "dtype": str(self.case.dtype).removeprefix("torch."),
            "save_ranks": self.case.save_ranks,
            "load_ranks": self.case.load_ranks,
            "axis": self.case.axis,
            "durable": self.case.durable,
            "measures": list(self.case.measures),
            "contestants": [
                asdict(e.result) for e in entrants if id(e) in settled or e.result.failed
            ],
            "settings_tried": [
                asdict(e.result) for e in entrants if id(e) not in settled and not e.result.failed
            ],
        }

    def _enter(self, contestant: Contestant) -> _Entrant:
        result = Result(contestant.name, contestant.family, contestant.detail)
        return _Entrant(contestant, contestant.open(self._work), result)

    def _guarded(self, entrant: _Entrant, step: Callable[[_Entrant], None]) -> None:
        try:
            step(entrant)
        except ContestantFailedError as error:
            entrant.result.failed = str(error)
            self._say(f"{self.case.name}: {entrant.result.name} failed: {error}")
        finally:
            self._remove()

    def _warm_up(self, entrant: _Entrant) -> None:
        """Imports, then memory and correctness, then what one call takes."""
        result = entrant.result
        if self._num_calls > 1:
            self._import_everything(entrant.contestant)
        with peak_memory() as peak:
            result.warm_up_seconds["save"] = self._save(entrant)
        result.peak_bytes["save"] = self._worst(peak.extra_bytes)
        if self._last is not None and self._world.rank == 0:
            result.num_files, result.stored_bytes = folder_size(self._last)
        result.needed_bytes = sum(self._world.gather(self._work.target_bytes))
        if "load" in self.case.measures:
            self._work.clear_target()
            with peak_memory() as peak:
                self._load(entrant)
            result.peak_bytes["load"] = self._worst(peak.extra_bytes)
            if not all(self._world.gather(self._work.target_is_right)):
                raise ContestantFailedError("what it loaded is not what it saved")
            before = read_bytes()
            result.warm_up_seconds["load"] = self._load(entrant)
            counts = self._world.gather(None if before is None else (read_bytes() or 0) - before)
            total = sum(count or 0 for count in counts)
            result.read_bytes = total if total > 0.95 * result.needed_bytes else None
        if "save" in self.case.measures and self._num_calls > 1:
            result.warm_up_seconds["save"] = self._save(entrant)

    def _import_everything(self, contestant: Contestant) -> None:
        work = Work.make(self.case.tiny(), self._saving, self._loading)
        calls = contestant.open(work)
        self._save(_Entrant(contestant, calls, Result("", "", "")), work)
        if "load" in self.case.measures:
            self._load(_Entrant(contestant, calls, Result("", "", "")))
        self._remove()

    def _with_best_settings(self, entrants: list[_Entrant]) -> list[_Entrant]:
        """Of candidates only the fastest of the warm-up; the same on all ranks."""
        operation = self.case.measures[0]
        candidates = [entrant for entrant in entrants if entrant.contestant.candidate]
        if not candidates:
            return entrants
        best = min(candidates, key=lambda e: e.result.warm_up_seconds[operation])
        return [e for e in entrants if e is best or e not in candidates]

    def _round(self, entrant: _Entrant) -> None:
        seconds = entrant.result.seconds
        if "save" in self.case.measures:
            times = [self._save(entrant) for _ in range(self._num_calls)]
            seconds["save"].append(min(times))
        if "load" in self.case.measures:
            if self._last is None:
                self._save(entrant)
            times = [self._load(entrant) for _ in range(self._num_calls)]
            seconds["load"].append(min(times))

    def _save(self, entrant: _Entrant, work: Work | None = None) -> float:
        """One save into a new, empty folder; the one before is removed."""
        self._remove()
        work = work or self._work
        side: Side = work.saving
        if entrant.contestant.saved_by_loaders and self.case.reshards:
            side = work.loading
            for tensor in work.target:
                tensor.fill()
        self._number += 1
        folder = self._folder / f"{self.case.name}-{self._number}"
        if self._world.rank == 0:
            folder.mkdir()
        if self.case.durable:
            os.sync()  # what others left in the page cache is not this contestant's to write
        self._last = folder
        return self._world.run(None if side.rank is None else lambda: entrant.calls.save(folder))

    def _load(self, entrant: _Entrant) -> float:
        folder = self._last
        assert folder is not None
        idle = self._loading.rank is None
        return self._world.run(None if idle else lambda: entrant.calls.load(folder))

    def _remove(self) -> None:
        self._world.barrier()
        if self._last is not None and self._world.rank == 0:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = None

    def _worst(self, value: int | None) -> int | None:
        values = [v for v in self._world.gather(value) if v is not None]
        return max(values, default=None)
