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
from bench_probes import folder_size, watched
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
        say: called with a line of progress.
    """

    def __init__(self, case: Case, world: World, folder: Path, say: Callable[[str], None]) -> None:
        self.case = case
        self._world = world
        self._folder = folder
        self._say = say
        self._number = 0
        self._last: Path | None = None
        self._tried: dict[str, float] = {}
        self._saving = make_side(case.save_ranks, world.rank, world.size)
        self._loading = make_side(case.load_ranks, world.rank, world.size)
        self._work = Work.make(case, self._saving, self._loading)

    def measure(self, contestants: Sequence[Contestant], deadline: float) -> dict[str, Any]:
        """Everything about the case.

        Args:
            contestants: all there are; those that the case does not name are left out.
            deadline: ``time.monotonic()`` after which no further round begins.
        """
        chosen = [c for c in contestants if c.name in self.case.contestants]
        entrants = self._with_best_settings([self._enter(contestant) for contestant in chosen])
        for entrant in entrants:
            self._say(f"{self.case.name}: warm-up, {entrant.result.name}")
            self._guarded(entrant, self._warm_up)
        racing = [entrant for entrant in entrants if entrant.contestant.timed]
        for number in range(self.case.rounds):
            late = number > 0 and time.monotonic() > deadline
            if self._world.from_rank0(late):
                self._say(f"{self.case.name}: out of time after {number} rounds")
                break
            self._say(f"{self.case.name}: round {number + 1} of {self.case.rounds}")
            first = number % len(racing) if racing else 0
            for entrant in racing[first:] + racing[:first]:
                if not entrant.result.failed:
                    self._guarded(entrant, self._round)
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
            "calls_a_round": self.case.calls,
            "contestants": [asdict(entrant.result) for entrant in entrants],
            "settings_tried": self._tried,
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

    def _with_best_settings(self, entrants: list[_Entrant]) -> list[_Entrant]:
        """Of candidates only the fastest, by the better of two calls; the same on all ranks."""
        candidates = [entrant for entrant in entrants if entrant.contestant.candidate]
        for entrant in candidates:
            self._say(f"{self.case.name}: trying {entrant.result.name}, {entrant.result.detail}")
            self._guarded(entrant, self._try)
        fit = [entrant for entrant in candidates if not entrant.result.failed]
        if not fit:
            return entrants
        best = min(fit, key=lambda entrant: self._tried[entrant.result.detail])
        return [entrant for entrant in entrants if entrant is best or entrant not in candidates]

    def _try(self, entrant: _Entrant) -> None:
        if "save" in self.case.measures:
            times = [self._save(entrant) for _ in range(min(2, self.case.calls))]
        else:
            self._save(entrant)
            times = [self._load(entrant) for _ in range(min(2, self.case.calls))]
        self._tried[entrant.result.detail] = min(times)

    def _warm_up(self, entrant: _Entrant) -> None:
        """Imports; then memory, bytes, files and whether what is loaded is right."""
        result = entrant.result
        if self.case.calls > 1 or self.case.rounds > 1:
            self._import_everything(entrant.contestant)
        with watched() as watch:
            self._save(entrant)
        result.peak_bytes["save"] = self._worst(watch.extra_bytes)
        if self._last is not None and self._world.rank == 0:
            result.num_files, result.stored_bytes = folder_size(self._last)
        result.needed_bytes = sum(self._world.gather(self._work.target_bytes))
        if "load" in self.case.measures:
            self._work.clear_target()
            with watched() as watch:
                self._load(entrant)
            result.peak_bytes["load"] = self._worst(watch.extra_bytes)
            counts = [count or 0 for count in self._world.gather(watch.read_bytes)]
            result.read_bytes = sum(counts) if sum(counts) > 0.95 * result.needed_bytes else None
            if not all(self._world.gather(self._work.target_is_right)):
                raise ContestantFailedError("what it loaded is not what it saved")

    def _import_everything(self, contestant: Contestant) -> None:
        work = Work.make(self.case.tiny(), self._saving, self._loading)
        calls = contestant.open(work)
        self._save(_Entrant(contestant, calls, Result("", "", "")), work)
        if "load" in self.case.measures:
            self._load(_Entrant(contestant, calls, Result("", "", "")))
        self._remove()

    def _round(self, entrant: _Entrant) -> None:
        seconds = entrant.result.seconds
        calls = range(min(self.case.calls, entrant.contestant.max_calls))
        if "save" in self.case.measures:
            seconds["save"].append(min([self._save(entrant) for _ in calls]))
        else:
            self._save(entrant)
        if "load" in self.case.measures:
            seconds["load"].append(min([self._load(entrant) for _ in calls]))

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
